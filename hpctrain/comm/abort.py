"""One rank's end is everybody's end.

An exception that leaves one rank would let the others wait for it for ever. So whatever gets out of a run on any
rank, also SystemExit and an import that fails, prints that rank's traceback and ends the whole job at once. An end
that all ranks agreed on is different: they meet first, politely, and leave through MPI_Finalize and C's exit handlers,
where MPICH says goodbye to its launcher; then the launcher reports their code, and nothing else.

`abort_on_error` holds a whole program; `guard` and `at_exit` do the same for a script of a user that only makes a Mesh.
"""

import atexit
import ctypes
import os
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable
from contextlib import contextmanager, suppress

from hpctrain.comm.progress import wait_until

LOST = 77  # exit code of a run that lost a rank which it cannot do without
GRACE_SECONDS = 10  # how long a rank waits for the launcher to end it


class RankFailed(RuntimeError):
    """This rank cannot go on, and its message says all there is to say: one line, printed without a traceback."""

    code = 1  # that the job ends with


class RankLost(RankFailed):
    """Another rank is lost, and this one does not go on."""

    code = LOST


_last_words: list[Callable[[], str]] = []
_before_finalize: list[Callable[[], None]] = []
_survivors: list = []  # the communicator of those that are left, where ranks were lost and the others go on


def last_words(call: Callable[[], str]) -> Callable[[], None]:
    """Should this rank fail, it says what `call` returns too, in a line. Returns what takes that back."""
    _last_words.append(call)
    return lambda: _last_words.remove(call)


@contextmanager
def abort_on_error():
    """Everything inside either returns, or ends the job. Covers helper threads too."""
    threading.excepthook = _abort_for_thread
    try:
        yield
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: others would wait for this rank
        _abort_job(error)


def guard() -> None:
    """From here on, an exception that nobody catches ends the job, also in a helper thread; sys.exit does not.

    Processes that this one forks keep Python's own way: their end is not this rank's.
    """
    process = os.getpid()

    def of_program(kind, error, trace) -> None:
        if os.getpid() != process:
            sys.__excepthook__(kind, error, trace)
            return
        _tell_rank()
        _abort_job(error.with_traceback(trace))

    def of_thread(failure) -> None:
        if os.getpid() != process:
            threading.__excepthook__(failure)
            return
        if not issubclass(failure.exc_type, SystemExit):
            _tell_rank()
        _abort_for_thread(failure)

    sys.excepthook, threading.excepthook = of_program, of_thread


def at_exit(end: Callable[[], None]) -> Callable[[], None]:
    """Calls `end` when the program ends, last come first; an exception in it ends the job.

    Returns what atexit.unregister takes. Forked processes, and a program that has ended MPI by itself, call nothing.
    """
    process = os.getpid()

    def call() -> None:
        if os.getpid() != process or _world() is None:
            return
        try:
            _flush()
            end()
        except BaseException as error:  # as where ranks disagree whether this is the end
            _abort_job(error)

    atexit.register(call)
    return call


def before_finalize(end: Callable[[], None]) -> None:
    """Calls `end` before MPI ends, by whomever, and after what is given to at_exit later than this."""
    _before_finalize.append(end)
    at_exit(end)


def finalize() -> None:
    """Ends MPI, politely after the last rank has come. Collective over those that are left."""
    if _survivors:
        with suppress(RuntimeError):  # that another one is lost now is of no interest any more
            wait_until(_survivors[-1].Iagree(array("i", [1])).Test)
    else:
        wait_until(_world().Ibarrier().Test)
    for end in _before_finalize:
        end()
    from mpi4py import MPI

    MPI.Finalize()


def go_on_with(survivors) -> None:
    """From here on all ranks are those of this communicator. Collective over them."""
    _survivors.append(survivors)


def leave(code: int) -> None:
    """Ends this process with `code`, which all ranks agreed on. Collective where MPI runs; does not return."""
    _flush()
    if _world() is not None:
        finalize()
    elif code:
        _abort_before_mpi(code)
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    alive = [thread.name for thread in threads if not thread.daemon]
    if alive:
        print(f"left without waiting for threads: {', '.join(alive)}", file=sys.stderr)
        _flush()
        ctypes.PyDLL(None).exit(code)  # Python's own exit would wait for them; with its lock held none wakes up in it
    sys.exit(code)


def _tell_rank() -> None:
    """Whose traceback follows: a script's lines don't say it, and other ranks may fail in consequence."""
    world = _world()
    if world is not None:
        with suppress(OSError, ValueError):
            print(f"hpctrain: rank {world.rank} of {world.size} failed and ends the job:", file=sys.stderr)


def _abort_for_thread(failure) -> None:
    """SystemExit ends a thread quietly, as everywhere in Python; anything else ends the job."""
    if not issubclass(failure.exc_type, SystemExit):
        _abort_job(failure.exc_value)


def _abort_job(error: BaseException) -> None:
    wanted = error.code if isinstance(error, (SystemExit, RankFailed)) else 1
    code = wanted if isinstance(wanted, int) and wanted else 1
    if isinstance(error, KeyboardInterrupt):
        code = 130
    try:
        if isinstance(error, RankFailed):
            print(f"hpctrain: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error, file=sys.stderr)
        for call in _last_words:
            print(f"hpctrain: {call()}", file=sys.stderr)
        _pass_on()
        _flush()
        time.sleep(0.1)  # what was printed is on its way to the launcher, which ends this process next
    finally:  # a second interrupt, or a full disk under standard error, must not keep the others waiting
        end_job(code)


def _pass_on() -> None:
    """What was said into memory is lost with the process: torch.distributed has excepthooks write there."""
    said = getattr(sys.stderr, "getvalue", None)
    if said is not None and sys.__stderr__ is not None:
        sys.__stderr__.write(said())
        sys.__stderr__.flush()


def end_job(code: int) -> None:
    """Ends all ranks with `code`, at once, from any thread."""
    world = _world()
    if world is not None:
        world.Abort(code)
    _abort_before_mpi(code)
    os._exit(code)


def _abort_before_mpi(code: int) -> None:
    """Ending before MPI_Init leaves the others in it: hydra does not notice. PMI-1 has a word for it."""
    if "PMI_FD" in os.environ:
        time.sleep(0.1)  # for what was printed, as in _abort_job
        try:
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
        except (OSError, ValueError):
            return
        time.sleep(GRACE_SECONDS)


def _world():
    """The world communicator where MPI runs, else None."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return None
    return module.COMM_WORLD


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
