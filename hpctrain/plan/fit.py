"""From measured times to the constants by which an all-reduce is chosen.

Messages take latency + bytes * seconds_per_byte: both come from all times of ring and doubling together, by the very
formulas that the choice uses, as the least sum of squares of relative errors: so 4 KiB count as much as 64 MiB. A
border between two algorithms is the one with the smallest product of times over all sizes, which for times that cross
once is the last size before they cross, and for others the border that costs least.
"""

import math
from collections.abc import Mapping

from hpctrain.plan.allreduce import BUILT_IN, Constants, by_messages
from hpctrain.plan.tuning import within

Times = Mapping[int, float]  # seconds of an all-reduce by its bytes
TIE = 0.02  # of a step's time: less than that is noise


def measured_constants(
    ring: Times,
    doubling: Times,
    num_ranks: int,
    staged: Times | None = None,
    between_nodes: tuple[Times, Times, int] | None = None,
    spans_nodes: bool = False,
) -> Constants:
    """Of the times of `num_ranks`, by messages (`ring`, `doubling`) and in shared memory, of arrays from elsewhere.

    `staged` None: they share none, or not enough; what is built in stays. `between_nodes`: ring and doubling over as
    many ranks as there are nodes, one of each; without it the messages are those of all ranks.
    """
    messages = between_nodes or (ring, doubling, num_ranks)
    latency, seconds_per_byte = fit(*messages)
    doubled = crossover(messages[1], messages[0])
    constants = Constants(latency, seconds_per_byte, int(within("largest_doubled", doubled)), BUILT_IN.largest_staged)
    if staged is None:
        return constants
    instead = dict(ring)
    if spans_nodes:
        instead |= {size: doubling[size] for size in ring if by_messages(size, num_ranks, constants) == "doubling"}
    border = int(within("largest_staged", crossover(staged, instead)))
    return Constants(latency, seconds_per_byte, constants.largest_doubled, border)


def fit(ring: Times, doubling: Times, num_ranks: int) -> tuple[float, float]:
    """Seconds of a message's start and of a byte. Neither is below what a constant may be."""
    start, byte = Constants(latency=1, seconds_per_byte=0), Constants(latency=0, seconds_per_byte=1)
    rows = [
        (start.seconds_of_ring(size, num_ranks) / time, byte.seconds_of_ring(size, num_ranks) / time)
        for size, time in ring.items()
    ]
    rows += [
        (start.seconds_of_doubling(size, num_ranks) / time, byte.seconds_of_doubling(size, num_ranks) / time)
        for size, time in doubling.items()
    ]
    latency, seconds_per_byte = _least_squares(rows)
    return within("latency", latency), within("seconds_per_byte", seconds_per_byte)


def _least_squares(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """The x, y >= 0 for which a * x + b * y is nearest to 1 over all rows (a, b)."""
    scale_a, scale_b = (max(row[place] for row in rows) for place in (0, 1))
    scaled = [(a / scale_a, b / scale_b) for a, b in rows]
    aa, ab, bb = (math.fsum(products) for products in zip(*((a * a, a * b, b * b) for a, b in scaled)))
    sum_a, sum_b = (math.fsum(row[place] for row in scaled) for place in (0, 1))
    determinant = aa * bb - ab * ab
    x, y = -1.0, -1.0
    if determinant:
        x, y = (sum_a * bb - sum_b * ab) / determinant, (sum_b * aa - sum_a * ab) / determinant
    if x < 0 or y < 0:  # the one that is left, by itself: whichever comes nearer
        alone = [(sum_a / aa, 0.0), (0.0, sum_b / bb)]
        x, y = min(alone, key=lambda pair: sum((a * pair[0] + b * pair[1] - 1) ** 2 for a, b in scaled))
    return x / scale_a, y / scale_b


def crossover(small: Times, large: Times) -> int:
    """The largest size, of those in both, up to which to take `small` and beyond it `large`; 0: never.

    Of borders that are as good the largest.
    """
    best, lowest, total = 0, 0.0, 0.0
    for size in sorted(small.keys() & large.keys()):
        total += math.log(small[size]) - math.log(large[size])
        if total <= lowest:
            best, lowest = size, total
    return best


def best_bucket(seconds: Mapping[int, float]) -> int:
    """The size of buckets with the shortest step; of those within TIE of it the largest, which sends least often."""
    limit = min(seconds.values()) * (1 + TIE)
    return max(size for size, time in seconds.items() if time <= limit)
