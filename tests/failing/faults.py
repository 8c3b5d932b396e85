"""Plants a fault into one rank of a real launch: `mpirun -n 3 python faults.py FAULT RANK [flags of hpctrain]`.

Everything else is the real thing: hpctrain's own start, guard and end. LOOP faults happen in a loop of all-reduces
that needs no torch; the others in a training run. The moment of the fault is written to the file that FAULT_TIME
names.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

FAULT, RANK = sys.argv[1], int(sys.argv[2])


def announced_rank() -> int:
    from hpctrain.comm.environment import announced

    return announced(os.environ).rank or 0


def happens() -> None:
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))


def raise_value_error():
    raise ValueError("boom")


def live_for_ever():
    threading.Thread(target=lambda: time.sleep(3600), name="helper-thread").start()


def with_a_live_thread():
    live_for_ever()
    raise_value_error()


def in_a_thread():
    threading.Thread(target=raise_value_error).start()
    time.sleep(3600)


def run_out_of_memory():
    raise MemoryError("no memory left")


def import_what_is_not_there():
    import a_module_that_is_not_installed  # noqa: F401


def with_a_full_disk_under_standard_error():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    raise_value_error()


def interrupted_twice():
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    time.sleep(3600)


def work_in_threads():
    """Threads that are in the middle of something, not asleep."""
    for _ in range(3):
        threading.Thread(target=lambda: [sorted(range(1000)) for _ in iter(int, 1)]).start()


def exit_of_a_thread():
    threading.Thread(target=sys.exit).start()


LOOP = {
    "raise": raise_value_error,
    "exit-3": lambda: sys.exit(3),
    "exit-0": lambda: sys.exit(0),
    "exit-text": lambda: sys.exit("these are my last words"),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "live-thread": with_a_live_thread,
    "in-a-thread": in_a_thread,
    "memory": run_out_of_memory,
    "full-stderr": with_a_full_disk_under_standard_error,
    "interrupted-twice": interrupted_twice,
    "import": import_what_is_not_there,
}


ENDS = {"end-with-thread": live_for_ever, "end-at-work": work_in_threads, "end-of-thread": exit_of_a_thread}


def loop(argv, comm) -> int:
    """Stands in for the command line: all-reduces until the fault, or a normal end by `end-...`."""
    import numpy as np

    from hpctrain.comm.mesh import Mesh

    mesh = Mesh(comm)
    total = mesh.data.ring.all_reduce(np.ones(1000), "step")
    for step in range(4):
        if FAULT in LOOP and step == 3 and mesh.rank == RANK:
            happens()
            LOOP[FAULT]()
            time.sleep(3600)
        total.start().wait()
    if FAULT in ENDS and mesh.rank == RANK:
        ENDS[FAULT]()
    mesh.close()
    return int(FAULT.removeprefix("end-code-")) if FAULT.startswith("end-code-") else 0


class Unimportable:
    """On the import path: the module named cannot be imported on this rank."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path, target=None):
        if name == self.name:
            happens()
            raise ImportError(f"{name} is broken on this node")


def break_a_step():
    from hpctrain.train.passes import Passes

    forward, calls = Passes._forward, []

    def fail(self, action):
        calls.append(action)
        if len(calls) == 3 and announced_rank() == RANK:
            happens()
            raise_value_error()
        return forward(self, action)

    Passes._forward = fail


def main():
    from hpctrain import __main__ as program

    if FAULT.startswith("no-") and announced_rank() == RANK:
        sys.meta_path.insert(0, Unimportable(FAULT.removeprefix("no-")))
    if FAULT in LOOP or FAULT.startswith("end-"):
        from hpctrain import cli

        cli.main = loop
    if FAULT == "step":
        sys.meta_path.insert(0, AfterImport("hpctrain.train.run", break_a_step))
    sys.argv[1:] = sys.argv[3:]
    program.main()


class AfterImport:
    """Calls `then` when `name` is about to be imported, once."""

    def __init__(self, name, then):
        self.name, self.then = name, then

    def find_spec(self, name, path, target=None):
        if name == self.name:
            self.name = None
            self.then()


if __name__ == "__main__":
    main()
