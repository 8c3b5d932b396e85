"""Ranks that go on when others are lost, where MPI lets them: user-level failure mitigation (ULFM).

An MPI without it ends the job when a process dies, and that is a good default. Open MPI has it from 5.0 on, under
`mpirun --with-ft ulfm`: then an operation that the lost rank had a part in raises an error, and so does a receive from
anybody on a communicator that it belongs to. Such a receive, which nothing ever answers, is how each rank comes to
know, whatever it is waiting for: by messages, by servers, or for nobody.
"""

import os
import time
from collections.abc import Mapping

import numpy as np

from hpctrain.comm.environment import is_mitigating
from hpctrain.comm.progress import Backoff, wait_until

NEWS_SECONDS = 10.0  # in which every rank hears of a loss


def check_mitigation(library: str, env: Mapping[str, str] = os.environ) -> None:
    """ValueError, one line, where this MPI ends the job with the first rank that is lost. `library`: its version."""
    if "Open MPI" not in library:
        name = library.split("\n")[0].split(",")[0].strip()
        raise ValueError(f"needs Open MPI 5 started as `mpirun --with-ft ulfm`; this is {name[:60]}")
    if not is_mitigating(env):
        raise ValueError("needs `mpirun --with-ft ulfm`, or Open MPI ends the job with the first rank that is lost")


class Survivors:
    """The ranks of `comm`, and after each `shrink` those of them that are left, in the same order. Collective.

    An operation of a Progress: it polls for a loss, which MPI then raises (`is_loss`), out of whatever is waited for.
    """

    def __init__(self, comm):
        self.comm, request = comm.Idup()
        wait_until(request.Test)
        self._launched, self._launch = comm.group, comm
        self._word, self._receive = np.empty(1, np.uint8), None
        self._before: list = []  # what MPI may still look at

    def explain(self, error: BaseException) -> bool:
        """Whether `error` is due to a loss."""
        return is_due_to_loss(error, self.comm)

    def poll(self) -> bool:
        from mpi4py import MPI

        if self._receive is None:
            self._receive = self.comm.Irecv(self._word, MPI.ANY_SOURCE)
        self._receive.Test()
        return False

    def all_finished(self, finished: bool) -> bool:
        """Whether all that are left say so. All hear the same."""
        self.comm.Ack_failed()
        return self.all_are(finished)

    def all_are(self, there: bool) -> bool:
        """Whether all say so, and nobody was lost. All hear the same."""
        try:
            return bool(self.comm.Agree(int(there)))
        except RuntimeError as error:
            if not is_loss(error):
                raise
            return False

    def shrink(self) -> list[int]:
        """Goes on without those that are lost; returns which ranks are left, by the numbers of before. All that are
        left come here, for who has not noticed is told.
        """
        self._before.append((self.comm, self._receive, self._word))
        before = self.comm
        before.Revoke()
        self.comm = before.Shrink()
        self._launch.Ack_failed()  # these explain no error of later on
        self._word, self._receive = np.empty(1, np.uint8), None
        return _numbers(self.comm.group, before.group)

    @property
    def launched_as(self) -> list[int]:
        """By rank: the number that it had in the launch."""
        return _numbers(self.comm.group, self._launched)


def _numbers(group, of_group) -> list[int]:
    from mpi4py import MPI

    return list(MPI.Group.Translate_ranks(group, list(range(group.size)), of_group))


def is_loss(error: BaseException) -> bool:
    """Whether MPI tells by it, or by what led to it, that ranks are lost."""
    from mpi4py import MPI

    told, losses = _of_mpi(error), (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return told is not None and told.Get_error_class() in losses


def is_due_to_loss(error: BaseException, comm) -> bool:
    """As `is_loss`. Operations in several steps, as Idup, only tell that they failed, and then `comm` tells why."""
    if is_loss(error) or _of_mpi(error) is None:
        return is_loss(error)
    backoff, deadline = Backoff(), time.monotonic() + NEWS_SECONDS
    while time.monotonic() < deadline:
        try:
            comm.Iprobe()
        except RuntimeError as other:
            return is_loss(other)
        backoff.pause()
    return False


def _of_mpi(error: BaseException | None):
    """That, or what led to it, if it is an error of MPI; else None."""
    from mpi4py import MPI

    while error is not None and not isinstance(error, MPI.Exception):
        error = error.__context__
    return error
