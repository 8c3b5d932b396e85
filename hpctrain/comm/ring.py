"""Ring collectives by hand over non-blocking messages: reduce-scatter, all-gather, all-reduce.

Everything happens in place. A collective is an operation that one starts, polls and waits for, and may start again;
several may be under way at a time.

    ring = Ring(communicator)             # a private one; collective
    total = ring.all_reduce(array, name="gradients")
    total.start()
    ...                                   # compute; total.poll() moves it on
    total.wait()

Traffic of an all-reduce of S bytes on n ranks: 2(n-1) steps, 2(n-1)/n * S bytes sent by each rank, within the
rounding of S into n chunks (every message counts, also an empty one, so that nobody finishes before all have joined).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from hpctrain.comm.bfloat16 import BFloat16, converter
from hpctrain.comm.call import Call
from hpctrain.comm.collective import Collective
from hpctrain.comm.compressed import CompressedCollective, check_compress, check_compressible
from hpctrain.comm.cuda_aware import takes_device_memory
from hpctrain.comm.device_collective import along_ring
from hpctrain.comm.one_shot import OneShot
from hpctrain.comm.progress import Progress
from hpctrain.comm.signature import Signature, SignatureChannel
from hpctrain.comm.through_host import on_host
from hpctrain.plan.allreduce import BUILT_IN

if TYPE_CHECKING:
    from hpctrain.comm.node import Node
    from hpctrain.comm.node_sum import NodeSum

SEGMENT_BYTES = 1 << 20
MOST_PEERS = 32  # ranks that all write to each other


@dataclass
class Counters:
    """What this rank sent so far; control is what carries no payload of the caller."""

    bytes_sent: int = 0
    messages_sent: int = 0
    control_messages: int = 0
    direct_bytes: int = 0  # of bytes_sent, from memory of a device that MPI itself read
    staged_bytes: int = 0  # of bytes_sent, from memory of a device through memory of the host


class Ring:
    """A ring over all ranks of `comm`, which must be private to it. Collective calls carry a signature.

    `names`: what errors call its ranks, where these are part of a larger ring.
    """

    def __init__(
        self,
        comm=None,
        progress: Progress | None = None,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        names: Sequence[int] | None = None,
    ):
        self.rank, self.size = (comm.rank, comm.size) if comm is not None else (0, 1)
        self.progress = progress or Progress()
        self.counters = Counters()
        self.segment_bytes = segment_bytes
        self.comm, self._name = comm, names[self.rank] if names is not None else self.rank
        self.channel = SignatureChannel(comm) if self.size > 1 else None
        self.num_calls, self._closed = 0, False
        self.active: list[Collective | OneShot | NodeSum] = []  # started and not done
        self.node: Node | None = None  # the shared memory of these ranks
        self.spans_nodes, self.node_sizes = False, [self.size]
        self.constants = BUILT_IN  # by which `auto` chooses

    @cached_property
    def bfloat16(self) -> BFloat16:
        """Converts for all calls whose messages are compressed."""
        return converter()

    @cached_property
    def takes_device_memory(self) -> bool:
        """Whether MPI is given memory of devices as it is."""
        return takes_device_memory(self.comm, self.progress)

    def all_reduce(self, array, name: str = "", compress: str = "none") -> Call:
        """Replaces `array` by the sum over all ranks, the same bits everywhere.

        Any shape and length; float16/32/64, bfloat16 (torch), integers (which wrap as NumPy's do), complex. An array of
        CuPy or a CUDA tensor is summed on its device, after what the caller's stream has been told before. Raises
        ValueError for an array that cannot be summed in place, CollectiveMismatch where ranks call different things.
        `compress` "bf16": messages carry bfloat16 (compressed.py), of float32 and float64 only.
        """
        check_compress(compress)
        if compress == "bf16":
            return self._compressed("all_reduce", array, name, gather=True)
        return along_ring(self, "all_reduce", array, name, reduce=True, gather=True)

    def one_shot(self, array, name: str) -> OneShot | Collective:
        """An all-reduce of a few numbers of our own, in one hop; along the ring where there are many ranks."""
        if self.size <= MOST_PEERS:
            return OneShot(self, array, name)
        return Collective(self, "one_shot", array, name, reduce=True, gather=True, control=True)

    def reduce_scatter(self, array, name: str = "", compress: str = "none") -> Call:
        """Leaves the sum of chunk `rank` of split_evenly(len, size) in its place; the rest of `array` is undefined.

        The bits are those that all_reduce would leave there.
        """
        check_compress(compress)
        if compress == "bf16":
            return self._compressed("reduce_scatter", array, name, gather=False)
        return along_ring(self, "reduce_scatter", array, name, reduce=True, gather=False)

    def all_gather(self, array, name: str = "") -> Collective:
        """Every rank's chunk `rank` of split_evenly(len, size) replaces that chunk everywhere. Any dtype."""
        return along_ring(self, "all_gather", array, name, reduce=False, gather=True)

    def _compressed(self, operation: str, array, name: str, gather: bool) -> Call:
        """What messages carry is made on the host, also of an array on a device."""
        check_compressible(array, name)
        return on_host(self, array, name, lambda each: CompressedCollective(self, operation, each, name, gather=gather))

    def agree(self, operation: str, dtype: str = "", length: int = 0, name: str = "") -> None:
        """Returns when all ranks have made this same call, for what is no collective of the ring; a barrier besides."""
        signature = self.announce(operation, dtype, length, name)
        self.progress.wait(lambda: self.channel.confirmed(signature))
        self.wait(self.comm.Ibarrier())  # which whoever disagrees does not enter

    def wait(self, request) -> None:
        """Waits for an MPI request of all ranks. Raises CollectiveMismatch where one of them does something else."""
        self.progress.wait(lambda: self.channel.poll() or request.Test())

    def close(self) -> None:
        """Ends the ring, when what is under way is done. Collective.

        A rank that still wants to call something gets CollectiveMismatch, and so do those that close. Safe on a broken
        ring, which is closed by each rank alone.
        """
        if self._closed or self.size == 1:
            return
        if self.broken:
            self.abandon()
        else:
            self.progress.wait(lambda: not self.active)
            self.agree("close")  # from here on no word can come on this ring, but what follows
            if self.node is not None:
                self.node.close()
            self.progress.wait(self.channel.drained)
            self.channel.abandon()
            self.progress.wait(self.comm.Ibarrier().Test)  # nobody speaks on a next ring before all stopped listening
        self._closed = True

    def abandon(self) -> None:
        """Takes back what is posted, of calls that will not be finished."""
        for call in self.active:  # stays in this list: a send that nobody took may still need its memory
            self.progress.remove(call)
            call.abandon()
        self.channel.abandon()
        if self.node is not None and self.node.across is not None:
            self.node.across.abandon()

    @property
    def broken(self) -> bool:
        """Whether ranks disagreed; messages that nobody takes may be on their way then."""
        return self.channel is not None and self.channel.broken

    def check_memory(self, operation) -> None:
        """RuntimeError where it would change memory of a call under way. Both know their buffer as `native`."""
        for other in self.active:
            if other is not operation and operation.native.overlaps(other.native):
                raise RuntimeError(
                    f"{operation.name} would change memory of {other.name}, which is under way; wait for it"
                )

    def join(self, name: str) -> int:
        """The number of a call that tells the others about itself; the channel listens for those who call another."""
        if self._closed:
            raise RuntimeError(f"{name}: the ring is closed")
        self.channel.listen()
        self.num_calls += 1
        return self.num_calls - 1

    def announce(self, operation: str, dtype: str, length: int, name: str) -> Signature:
        signature = Signature(self._name, self.join(f"{operation} {name}"), operation, dtype, length, name)
        self.channel.announce(signature)
        self.counters.control_messages += 1
        return signature
