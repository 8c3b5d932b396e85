"""A reduce-scatter of each bucket of gradients; when its owners have stepped, an all-gather of its weights."""

import time
from collections.abc import Collection

from hpctrain.comm.collective import Collective
from hpctrain.comm.ring import Ring
from hpctrain.model.gradients import FlatGradients
from hpctrain.model.optimizer_shard import OptimizerShard
from hpctrain.train.reduction import Times


class ShardedReduction:
    """As Reduction, of whose sums each rank gets those that it owns; `gather_weights` then brings all weights to all.

    Buckets with a parameter named in `shared` are summed whole, because more than their owner needs them. `compress` is
    for gradients; weights travel as they are.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        shard: OptimizerShard,
        ring: Ring,
        shared: Collection[str] = (),
        compress: str = "none",
    ):
        self.collectives: list[Collective] = []
        self.gathers: list[Collective] = []
        self._shares: list[float] = []  # of a bucket's bytes, that each rank sends a step
        for number, (bucket, weights) in enumerate(zip(gradients.buckets, shard.weights)):
            is_whole = not set(bucket.names).isdisjoint(shared)
            reduce = ring.all_reduce if is_whole else ring.reduce_scatter
            self.collectives.append(reduce(bucket.flat, f"gradients {number}", compress))
            self.gathers.append(ring.all_gather(weights, f"weights {number}"))
            ways = (1 + is_whole) * self.collectives[-1].wire_share + 1
            self._shares.append(ways * (ring.size - 1) / ring.size)
        self._sizes = [weights.nbytes for weights in shard.weights]
        self._times = [Times() for _ in self._sizes]
        self._waited_from = 0.0

    def start(self, number: int) -> None:
        self.collectives[number].start()

    def wait(self) -> None:
        self._waited_from = time.perf_counter()
        for collective in self.collectives:
            collective.wait()

    def gather_weights(self) -> None:
        """Replaces all weights by those of their owners. Collective."""
        for gathering in self.gathers:
            gathering.start()
        for reducing, gathering, times in zip(self.collectives, self.gathers, self._times):
            gathering.wait()
            times.note(reducing.began, reducing.seconds, self._waited_from, gathering.seconds)

    def settle(self, applied: bool, used: Collection[str]) -> None:
        """Sums are whole, so nothing of a step is kept for the next."""

    def figures(self) -> list[dict]:
        """For each bucket, of both ways; only the first one can be hidden."""
        buckets = zip(self.collectives, self._sizes, self._shares, self._times)
        return [
            {"algorithm": "ring", "compress": sums.wire} | times.figures(size, share)
            for sums, size, share, times in buckets
        ]
