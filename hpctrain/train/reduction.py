"""The sums of the gradients over the replicas: an all-reduce for each bucket, started again every step."""

import statistics
import time
from collections import deque
from collections.abc import Collection

from hpctrain.comm.allreduce import all_reduce
from hpctrain.comm.ring import Ring
from hpctrain.model.gradients import FlatGradients

REMEMBERED = 1000  # steps whose times count in the figures


class Times:
    """How long the sum of a bucket took in each step, and how much of that passed while this rank computed."""

    def __init__(self):
        self._seconds: deque[float] = deque(maxlen=REMEMBERED)
        self._hidden: deque[float] = deque(maxlen=REMEMBERED)

    def note(self, began: float, seconds: float, waited_from: float, behind: float = 0.0) -> None:
        """`waited_from`: when this rank had nothing left to compute; `behind`: seconds that came after that besides.

        By time.perf_counter.
        """
        self._seconds.append(seconds + behind)
        self._hidden.append(min(max(waited_from - began, 0.0), seconds))

    def figures(self, nbytes: int, traffic: float) -> dict:
        """Bytes; median seconds from start to end, waiting for others included; the bandwidth of `traffic` times the
        bytes, in bytes/s; the share of the seconds that was hidden behind computation.
        """
        seconds, total = statistics.median(self._seconds or [0.0]), sum(self._seconds)
        return {
            "bytes": nbytes,
            "seconds": seconds,
            "bus_bandwidth": traffic * nbytes / seconds if seconds and traffic else None,
            "hidden_share": sum(self._hidden) / total if total and traffic else None,
        }


class Reduction:
    """`start` buckets in ascending order as they become complete, then `wait` for all."""

    def __init__(self, gradients: FlatGradients, ring: Ring, algorithm: str = "auto", compress: str = "none"):
        self._buckets, self._num_ranks = gradients.buckets, ring.size
        self.collectives = [
            all_reduce(ring, bucket.flat, f"gradients {i}", algorithm, compress)
            for i, bucket in enumerate(self._buckets)
        ]
        self._times = [Times() for _ in self._buckets]

    def start(self, number: int) -> None:
        self.collectives[number].start()

    def go_on(self) -> None:
        """All are started, and each moves on by itself."""

    def forget(self) -> None:
        """Nobody waits for them any more."""

    def wait(self) -> None:
        waited_from = time.perf_counter()
        for collective, times in zip(self.collectives, self._times):
            collective.wait()
            times.note(collective.began, collective.seconds, waited_from)

    def settle(self, applied: bool, used: Collection[str]) -> None:
        """Sums are whole, so nothing of a step is kept for the next."""

    def figures(self) -> list[dict]:
        """For each bucket."""
        traffic = 2 * (self._num_ranks - 1) / self._num_ranks
        buckets = zip(self._buckets, self.collectives, self._times)
        return [
            {"algorithm": sums.algorithm, "compress": sums.wire}
            | times.figures(each.flat.nbytes, traffic * sums.wire_share)
            for each, sums, times in buckets
        ]
