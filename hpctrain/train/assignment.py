"""Which layers each stage gets: decided by rank 0, from what the layers cost, and told to all."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.costs import LayerCost, walk
from hpctrain.model.precision import Precision
from hpctrain.plan.partition import check_stages, partition, split_by_counts
from hpctrain.train.checked import checked_layer
from hpctrain.train.errors import AgreedError

WAYS = ("flops", "parameters")


class Assignment(NamedTuple):
    """`parts[q]`: the layers of group q, which lies on stage q % num_stages; `pairs`: names of one parameter."""

    parts: list[range]
    pairs: list[tuple[str, str]]

    def of_stage(self, stage: int, num_stages: int) -> list[range]:
        """The groups of one stage, by chunk."""
        return self.parts[stage::num_stages]


def assign_layers(
    config: Config, factories: Sequence[Callable[[], nn.Module]], mesh: Mesh, example: Callable[[], Any] | None
) -> Assignment:
    """The same on all ranks. AgreedError where the layers do not go round. Collective.

    `example()` gives inputs of a few rows, which rank 0 sends through the model, one layer in memory at a time.
    """
    num_parts = config.stages * (config.chunks or 1)
    if num_parts == 1:
        return Assignment([range(len(factories))], [])
    answer = mesh.world.broadcast_json(_answer(config, factories, mesh.size, example) if mesh.rank == 0 else None)
    if "fault" in answer:
        raise AgreedError(answer["fault"])
    return Assignment([range(*part) for part in answer["parts"]], [tuple(pair) for pair in answer["pairs"]])


def _answer(config: Config, factories: Sequence, num_ranks: int, example: Callable[[], Any] | None) -> dict:
    """What rank 0 tells the others: `parts` and `pairs`, or a `fault`. What a layer raises gets through."""
    num_chunks = config.chunks or 1
    try:
        check_stages(len(factories), config.stages, num_chunks, num_ranks)
    except ValueError as error:
        return {"fault": str(error)}
    inputs = example() if example is not None and config.stage_split != "parameters" else None
    try:
        found = walk(factories, inputs, config.seed, Precision(config.precision), checked_layer)
    except AgreedError as error:
        return {"fault": str(error)}
    try:
        parts = cut(config.stage_split, found.costs, config.stages * num_chunks)
    except ValueError as error:
        return {"fault": str(error)}
    return {"parts": [[part.start, part.stop] for part in parts], "pairs": found.shared}


def cut(how: str, costs: Sequence[LayerCost], num_parts: int) -> list[range]:
    """The groups of layers that `--stage-split` asks for. ValueError, one line, where it cannot be."""
    if how in WAYS:
        return partition([getattr(cost, how) for cost in costs], num_parts)
    if how.replace(",", "").replace(" ", "").isdecimal():
        return split_by_counts(how, len(costs), num_parts)
    return partition(measured_costs(how, len(costs)), num_parts)


def measured_costs(path: str, num_layers: int) -> list[float]:
    """Seconds of each layer, forward and backward, from a file that `profile` wrote. ValueError, one line."""
    try:
        layers = json.loads(Path(path).read_text(encoding="utf-8"))["layers"]
        costs = [float(layer["forward"]) + float(layer["backward"]) for layer in layers]
    except OSError as error:
        raise ValueError(
            f"--stage-split {path}: {error.strerror}; expected {' or '.join(WAYS)}, layers a stage such as 3,2,2,4, or"
            " a file that `profile` wrote"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--stage-split {path}: no file that `profile` wrote") from None
    if len(costs) != num_layers:
        raise ValueError(f"--stage-split {path}: it has {len(costs)} layers, the model {num_layers}; profile it again")
    return costs
