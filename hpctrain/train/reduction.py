"""The sums of the gradients over the replicas: an all-reduce for each bucket, started again every step."""

import statistics
from collections import deque

from hpctrain.comm.allreduce import all_reduce
from hpctrain.comm.ring import Ring
from hpctrain.model.gradients import FlatGradients

REMEMBERED = 1000  # steps whose times count in the figures


class Reduction:
    """`start` buckets in ascending order as they become complete, then `wait` for all."""

    def __init__(self, gradients: FlatGradients, ring: Ring, algorithm: str = "auto"):
        self._buckets, self._num_ranks = gradients.buckets, ring.size
        self.collectives = [
            all_reduce(ring, bucket.flat, f"gradients {i}", algorithm) for i, bucket in enumerate(self._buckets)
        ]
        self._seconds: list[deque[float]] = [deque(maxlen=REMEMBERED) for _ in self._buckets]

    def start(self, number: int) -> None:
        self.collectives[number].start()

    def wait(self) -> None:
        for collective, seconds in zip(self.collectives, self._seconds):
            collective.wait()
            seconds.append(collective.seconds)

    def figures(self) -> list[dict]:
        """For each bucket: bytes, median seconds from start to end (waiting included), bus bandwidth in bytes/s."""
        figures = []
        for bucket, collective, seconds in zip(self._buckets, self.collectives, self._seconds):
            size, median = bucket.flat.nbytes, statistics.median(seconds or [0.0])
            share = 2 * (self._num_ranks - 1) / self._num_ranks
            bandwidth = share * size / median if median and share else None
            figures.append(
                {"algorithm": collective.algorithm, "bytes": size, "seconds": median, "bus_bandwidth": bandwidth}
            )
        return figures
