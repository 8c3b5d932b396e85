"""The law of sums through shared memory, and bugs that it must see."""

import hashlib
import random

import numpy as np

from hpctrain.comm import node_entries
from hpctrain.comm.board import REDUCED, Board
from hpctrain.comm.node_entries import Staged
from hpctrain.comm.node_sum import NodeSum
from hpctrain.comm.nodes import join_node
from hpctrain.comm.ring import Ring
from tests.comm.arrays import GUARD, Guarded, _tensor, bits_dtype, expected_sum, same, share

GAP = 64  # bytes between arrays in a window, that nobody may change


def sums(comm, peers, dtype, lengths, place, *, stage_bytes=1 << 20, seed=0, held_up=False, kind="random") -> list[str]:
    """All lengths at once, in shared memory or elsewhere: the sum in the promised order, nothing else touched.

    Waited for in another order on each rank. `held_up`: rank 0 only begins, before the others, and they go as far as
    they can before it goes on; no sum of more than FLAT_BYTES can be done then.
    """
    ring = Ring(comm)
    join_node(ring, stage_bytes)
    everything = [
        [share(dtype, length, rank, seed + i, kind) for rank in range(comm.size)] for i, length in enumerate(lengths)
    ]
    own = [shares[comm.rank] for shares in everything]
    arrays, untouched = _in_window(ring, dtype, own) if place == "window" else _elsewhere(dtype, own)
    under_way = [NodeSum(ring.node, array, f"sum {i}") for i, (array, _) in enumerate(arrays)]
    problems = _go_as_far_as_possible(peers, under_way) if held_up else []
    for each in under_way if not held_up else ():
        each.start()
    for each in random.Random(comm.rank).sample(under_way, len(under_way)):
        each.wait()
    peers.everybody()  # nobody looks before the last has written
    digest = hashlib.sha256()
    for shares, (_, bits) in zip(everything, arrays, strict=True):
        wanted = expected_sum(dtype, shares, kind)
        if not same(bits, wanted, dtype):
            problems.append(f"{dtype} x {len(bits)}: {bits[:20]} instead of {wanted[:20]}")
        digest.update(bits.tobytes())
    problems += [] if untouched() else ["memory beside the arrays was changed"]
    problems += [] if len(set(peers.everybody(digest.hexdigest()))) == 1 else ["ranks hold different bits"]
    del arrays, under_way, untouched, bits
    ring.close()
    return problems


def _go_as_far_as_possible(peers, sums_) -> list[str]:
    for late in (False, True):
        if late == (peers.rank > 0):
            for each in sums_:
                each.start()
        peers.everybody()
    done = [each.poll() for each in sums_ * 3][-len(sums_) :] if peers.rank else []
    return ["done before all had a share in it"] if any(map(any, peers.everybody(done))) else []


def _elsewhere(dtype, values):
    guarded = [Guarded(dtype, each) for each in values]
    return [(each.array, each.bits) for each in guarded], lambda: all(each.guards_untouched() for each in guarded)


def _in_window(ring, dtype, values):
    """Arrays one after another in one window, each behind a gap."""
    memory = ring.node.allocate(sum(each.nbytes + GAP + 16 for each in values) + GAP)
    memory[:] = GUARD
    arrays, gaps, at = [], [], 0
    for each in values:
        gaps.append(memory[at : at + GAP])
        at += GAP
        bits = memory[at : at + each.nbytes].view(bits_dtype(dtype))
        bits[:] = each
        arrays.append((_tensor(bits) if dtype == "bfloat16" else bits, bits))
        at += each.nbytes + -each.nbytes % 16  # complex numbers at their own alignment, and no more
    gaps.append(memory[at:])
    return arrays, lambda: all((gap == GUARD).all() for gap in gaps)


def _do_not_wait_for_the_sums(self, counter, entry):
    return counter == REDUCED or all(board[counter] >= entry for board in self._integers)


def _take_a_stage_that_is_in_use(self):
    self._stage = self.sum.node.num_staged % 2
    return True


def _write_to_all_but_the_last(shares):
    for other in shares[1:-1]:
        np.copyto(other, shares[-1])


BUGS = {  # what becomes what, and where the law is looked at
    "does not wait for the sums of others": (Board, "reached", _do_not_wait_for_the_sums, "elsewhere", [9000]),
    "copies into a stage that others read": (Staged, "may_arrive", _take_a_stage_that_is_in_use, "elsewhere", [9000]),
    "keeps a sum from one rank": (node_entries, "_write_to_all", _write_to_all_but_the_last, "window", [9000]),
}
