"""Sums of gradients that are compressed further than a message can be: by what of them is sent at all.

Each bucket goes through the exchange of its compressor (model/compressors.py). What a rank did not send it adds to its
next gradient, in the unit of gradients as they travel: sums over items in a run, so where updates have unequal numbers
of items, what is left of one weighs in the next as many as it was of. Of a parameter that no rank used in a step
everything stays kept, as it is not stepped.
"""

import time
from collections.abc import Collection, Mapping

import torch

from hpctrain.comm.allreduce import all_reduce
from hpctrain.comm.call import Call
from hpctrain.comm.ring import Ring
from hpctrain.model.buckets import Bucket
from hpctrain.model.compressors import Compressor, Gather, Part, Sum
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.power_sgd import PowerSGD
from hpctrain.model.top_k import TopK
from hpctrain.plan.compression import WIRE, goes_by, parse_compression
from hpctrain.train.reduction import Reduction, Times


class BucketExchange:
    """The exchange of one bucket, in steps: to `start` it comes to its first collective, `advance` to the next one."""

    algorithm = "ring"

    def __init__(self, number: int, bucket: Bucket, ring: Ring, algorithm: str, compressor: Compressor, parts: Mapping):
        self._name, self._flat, self._ring, self._algorithm = f"gradients {number}", bucket.flat, ring, algorithm
        self._compressor = compressor.bucket(number, bucket.flat, parts, ring.rank, ring.size)
        self.kept, self._left = torch.zeros_like(bucket.flat), torch.zeros_like(bucket.flat)
        self._places = {name: part.place for name, part in parts.items()}
        self._calls: list[tuple[torch.Tensor, Call]] = []
        self.done, self.is_finite, self.divisor = True, True, 1.0
        self.began = self.seconds = 0.0

    def start(self) -> None:
        self.began, self.done, self._number = time.perf_counter(), False, -1
        self._flat.add_(self.kept)
        self._left.copy_(self._flat)
        self._steps = self._compressor.exchange(self._flat, self._left)
        self._go_on()

    def wait(self) -> None:
        """For what is under way."""
        self._calls[self._number][1].wait()

    def advance(self) -> bool:
        """Begins what comes next where what was under way is there. In the same order of exchanges on all ranks."""
        if not self._calls[self._number][1].poll():
            return False
        self._go_on()
        return True

    def settle(self, applied: bool, used: Collection[str]) -> None:
        """What was not sent is kept for the next step; not `applied`: what was kept for this one.

        So it is of the parameters that are not among those `used`.
        """
        if applied:
            for name, place in self._places.items():
                if name not in used:
                    self._left[place] = self.kept[place]
            self.kept, self._left = self._left, self.kept
        self._compressor.settle(applied)

    def kept_by_name(self) -> dict[str, torch.Tensor]:
        return {name: self.kept[place] for name, place in self._places.items()}

    def memory(self) -> Mapping[str, torch.Tensor]:
        return self._compressor.memory() if hasattr(self._compressor, "memory") else {}

    @property
    def traffic(self) -> float:
        """Bytes that each rank sends a step, by those of the bucket; of a sum as a ring would send them."""
        sent = sum(array.nbytes * (1 if array.dim() > 1 else 2) for array, _ in self._calls)
        return sent * (self._ring.size - 1) / self._ring.size / max(self._flat.nbytes, 1)

    def _go_on(self) -> None:
        wanted = next(self._steps, None)
        if wanted is not None:
            self._number += 1
            self._call(wanted).start()
            return
        if self.divisor != 1:
            self._flat.div_(self.divisor)
        self.is_finite = bool(torch.isfinite(self._flat).all())
        self.seconds, self.done = time.perf_counter() - self.began, True

    def _call(self, wanted: Sum | Gather) -> Call:
        """The collective, the one of the last step where it is for the same array."""
        number, array = self._number, wanted.array
        if number < len(self._calls) and self._calls[number][0] is array:
            return self._calls[number][1]
        name = f"{self._name}, {number + 1}"
        if isinstance(wanted, Gather):
            call: Call = self._ring.all_gather(array.view(-1), name)
        else:
            call = all_reduce(self._ring, array, name, self._algorithm)
            self.algorithm = call.algorithm
        self._calls[number:] = [(array, call)]
        return call


class FeedbackReduction:
    """As Reduction, by a compressor; what is left is taken over when the step is `settled`."""

    def __init__(self, gradients: FlatGradients, ring: Ring, algorithm: str, compress: str | Compressor):
        self._buckets, self._name = gradients.buckets, describe(compress)
        compressor, self.collectives = compressor_of(compress), []
        for number, bucket in enumerate(self._buckets):
            places = gradients.places_within(bucket)
            parts = {name: Part(place, gradients.views[name].shape) for name, place in places.items()}
            self.collectives.append(BucketExchange(number, bucket, ring, algorithm, compressor, parts))
        self._times = [Times() for _ in self._buckets]
        self._progress = ring.progress
        self._next: list[BucketExchange] = []  # those of a round that are still to advance

    def start(self, number: int) -> None:
        self.collectives[number].start()

    def go_on(self) -> None:
        """All are started: they move on whatever this rank waits for, be it the sums of another model."""
        self._progress.add(self)

    def poll(self) -> bool:
        """Goes through all buckets, round by round, so that all ranks begin the same collectives in the same order."""
        while self._next or not self._is_over():
            self._next = self._next or [each for each in self.collectives if not each.done]
            if not self._next[0].advance():
                return False
            del self._next[0]
        return True

    def wait(self) -> None:
        waited_from = time.perf_counter()
        self.go_on()
        self._progress.wait(self.poll)
        for each, times in zip(self.collectives, self._times):
            times.note(each.began, each.seconds, waited_from)

    def forget(self) -> None:
        """Nobody waits for them any more."""
        self._next = []
        self._progress.remove(self)

    def _is_over(self) -> bool:
        return all(each.done for each in self.collectives)

    def settle(self, applied: bool, used: Collection[str]) -> None:
        """The step was made; or it was skipped, as every rank knows, and what was kept stays. A sum that is not finite
        cannot have been applied. `used`: parameters that any rank used, and that are stepped therefore."""
        applied = applied and all(each.is_finite for each in self.collectives)
        for each in self.collectives:
            each.settle(applied, used)

    def kept(self) -> dict[str, torch.Tensor]:
        """By parameter, flat: what this rank has not sent yet."""
        return {name: each for exchange in self.collectives for name, each in exchange.kept_by_name().items()}

    def memory(self) -> dict[str, torch.Tensor]:
        """By parameter: what its compressor goes on with, the same on all ranks."""
        return {name: each for exchange in self.collectives for name, each in exchange.memory().items()}

    def figures(self) -> list[dict]:
        """For each bucket."""
        return [
            {"algorithm": each.algorithm, "compress": self._name} | times.figures(bucket.flat.nbytes, each.traffic)
            for bucket, each, times in zip(self._buckets, self.collectives, self._times)
        ]


def check_compressor(compress: str | Compressor, algorithm: str) -> None:
    """ValueError for what compresses nothing, or not by this algorithm."""
    kind = "own"
    if not isinstance(compress, str):
        if not callable(getattr(compress, "bucket", None)):
            raise ValueError(
                f"compress: {describe(compress)} has no method bucket(); see hpctrain/model/compressors.py"
            )
    else:
        try:
            kind = parse_compression(compress).kind
        except ValueError as error:
            raise ValueError(f"compress={compress!r}: {error}") from None
    if not goes_by(kind, algorithm):
        raise ValueError(
            f"algorithm={algorithm!r}: what {describe(compress)} sends does not go so; use 'auto' or 'ring'"
        )


def compressor_of(compress: str | Compressor) -> Compressor:
    """By its name, as --compress has it; anything else is one itself."""
    if not isinstance(compress, str):
        return compress
    kind, value = parse_compression(compress)
    return TopK(value) if kind == "topk" else PowerSGD(int(value))


def describe(compress: str | Compressor) -> str:
    """The same words on all ranks that have the same."""
    return compress if isinstance(compress, str) else type(compress).__qualname__


def reduction_of(
    gradients: FlatGradients, ring: Ring, algorithm: str = "auto", compress: str | Compressor = "none"
) -> Reduction | FeedbackReduction:
    """What sums these gradients up; one rank alone has nothing to send, and leaves nothing out."""
    if compress in WIRE or ring.size == 1:
        return Reduction(gradients, ring, algorithm, compress if compress in WIRE else "none")
    return FeedbackReduction(gradients, ring, algorithm, compress)
