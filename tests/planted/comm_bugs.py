"""Bugs of the communication layer that its checks must see: what is planted where, and how many ranks show it.

None of them hangs. tests/comm/test_planted.py plants each and expects the check named here to turn red.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from hpctrain.comm import collective, signature
from hpctrain.comm.buffer import Buffer, HalfBuffer
from hpctrain.comm.collective import Collective
from hpctrain.comm.progress import Backoff
from hpctrain.comm.signature import Signature
from hpctrain.plan.ring import RingStep


class Bug(NamedTuple):
    """`target.attribute` becomes `planted`; `check` is the name of a check in tests/comm/test_planted.py."""

    target: object
    attribute: str
    planted: Callable
    check: str
    min_size: int = 2


def _drop_all_but_the_first_segment(self, start, received):
    if start == 0:
        self.values[start : start + received.size] += received


def _also_change_the_next_element(self, start, received):
    longer = np.lib.stride_tricks.as_strided(self.values[start:], (received.size + 1,))
    longer[:-1] += received
    longer[-1] = 0


def _one_rank_rounds_otherwise(self, start, stop, partials, divisor):
    self.values[start:stop] = np.nextafter(partials.values[start:stop].astype(np.float16), np.float16(0))


def _chunks_end_one_rank_early(rank, size):
    return [RingStep((rank - step) % size, (rank - step - 1) % size) for step in range(size - 1)]


def _chunks_start_one_rank_late(rank, size):
    return [RingStep((rank - step + 1) % size, (rank - step) % size) for step in range(size - 1)]


class OtherOrder:
    """The other usual ring: right sums, but chunk c is summed from rank c on."""

    scatter_reduce = staticmethod(_chunks_end_one_rank_early)
    all_gather = staticmethod(_chunks_start_one_rank_late)


def _overwrite_while_it_is_sent(self):
    if not hasattr(self, "planted"):
        self.planted = True
        self.native.message(0, len(self.native))[:] ^= 1
    return _retire_sends(self)


_retire_sends = Collective._retire_sends


def _count_twice(self, message):
    self._ring.counters.messages_sent += 1
    self._ring.counters.bytes_sent += 2 * message.size


KEPT = []  # what MPI may still fill must not be given away, also not by a planted bug
BUGS = {
    "a segment is dropped": Bug(Buffer, "add", _drop_all_but_the_first_segment, "sums"),
    "memory beside the array is touched": Bug(Buffer, "add", _also_change_the_next_element, "guards"),
    "float16 is summed in float16": Bug(HalfBuffer, "partials", lambda self: self, "half", 3),
    "float16 is rounded down": Bug(HalfBuffer, "finish", _one_rank_rounds_otherwise, "half"),
    "sums are made in another order": Bug(collective, "steps", OtherOrder, "sums", 3),
    "received into memory still being sent": Bug(Collective, "_may_overwrite", lambda self, index: True, "buffers"),
    "changed while being sent": Bug(Collective, "_retire_sends", _overwrite_while_it_is_sent, "buffers"),
    "bytes are miscounted": Bug(Collective, "_count", _count_twice, "traffic"),
    "all calls are taken for the same": Bug(Signature, "agrees", lambda self, other: True, "disagreement"),
    "the error names nobody": Bug(Signature, "__str__", lambda self: "somebody", "disagreement"),
    "a broken ring leaves receives behind": Bug(signature, "take_back", KEPT.extend, "disagreement"),
    "a broken ring takes calls": Bug(Collective, "start", lambda self: self, "refusal"),
    "a waiting rank keeps busy": Bug(Backoff, "pause", lambda self: sum(range(50_000)), "waiting"),
}
