"""Which consecutive layers each stage gets: a pipeline runs at the pace of its slowest stage, so that is made fast."""

from collections.abc import Sequence
from itertools import accumulate


def partition(costs: Sequence[float], num_stages: int) -> list[range]:
    """Cuts the layers, whose costs these are, into `num_stages` ranges with the smallest largest sum.

    Every stage gets a layer. Among cuts that are as good, the last stages get fewer: the very last computes the loss
    too. ValueError, one line that names the flag, where there are fewer layers than stages.
    """
    check_stages(len(costs), num_stages)
    sums = [0.0, *accumulate(costs)]
    best = [[sums[stop] for stop in range(len(sums))]]  # best[k][stop]: largest sum of layers [0, stop) on k + 1 stages
    cuts: list[list[int]] = [[0] * len(sums)]
    for stage in range(1, num_stages):
        row, cut = [float("inf")] * len(sums), [0] * len(sums)
        for stop in range(stage + 1, len(sums)):
            for start in range(stage, stop):
                largest = max(best[stage - 1][start], sums[stop] - sums[start])
                if largest <= row[stop]:
                    row[stop], cut[stop] = largest, start
        best.append(row)
        cuts.append(cut)
    return _walk_back(cuts, len(costs), num_stages)


def split_by_counts(text: str, num_layers: int, num_stages: int) -> list[range]:
    """The ranges of `--stage-split 3,2,2,4`. ValueError, one line, where the numbers do not fit."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--stage-split {text}: expected the layers of each stage, one at least, such as 3,2,2,4")
    counts = [int(word) for word in words]
    if len(counts) != num_stages or sum(counts) != num_layers:
        found = f"{len(counts)} stages with {sum(counts)} layers"
        raise ValueError(f"--stage-split {text}: {found}; there are {num_stages} stages and {num_layers} layers")
    borders = [0, *accumulate(counts)]
    return [range(start, stop) for start, stop in zip(borders, borders[1:])]


def check_stages(num_layers: int, num_stages: int, num_chunks: int = 1, num_ranks: int | None = None) -> None:
    """ValueError where a stage would have no layer; it names those that work, on `num_ranks` if given."""
    if num_stages * num_chunks > num_layers:
        most = num_layers // num_chunks
        fitting = [str(stages) for stages in range(1, most + 1) if num_ranks is not None and num_ranks % stages == 0]
        each = f" with --chunks {num_chunks}" if num_chunks > 1 else ""
        has = f"the model has {num_layers} layer{'s' * (num_layers != 1)}, enough for {most} stage{'s' * (most != 1)}"
        would_do = f"; on {num_ranks} ranks --stages {', '.join(fitting)} would do" if fitting else ""
        raise ValueError(f"--stages {num_stages}{each}: {has}{would_do}")


def _walk_back(cuts: list[list[int]], num_layers: int, num_stages: int) -> list[range]:
    ranges, stop = [], num_layers
    for stage in reversed(range(num_stages)):
        start = cuts[stage][stop]
        ranges.append(range(start, stop))
        stop = start
    return ranges[::-1]
