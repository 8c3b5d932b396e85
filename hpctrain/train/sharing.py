"""Which layers each stage gets: decided by rank 0, from what the layers cost, and told to all."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.costs import walk
from hpctrain.model.precision import Precision
from hpctrain.plan.partition import check_stages, partition, split_by_counts
from hpctrain.train.checked import checked_layer
from hpctrain.train.errors import AgreedError

WAYS = ("flops", "parameters")


class Shares(NamedTuple):
    """`parts[q]`: the layers of group q, which lies on stage q % num_stages; `pairs`: names of one parameter."""

    parts: list[range]
    pairs: list[tuple[str, str]]

    def of_stage(self, stage: int, num_stages: int) -> list[range]:
        """The groups of one stage, by chunk."""
        return self.parts[stage::num_stages]


def share_out(
    config: Config, factories: Sequence[Callable[[], nn.Module]], mesh: Mesh, example: Callable[[], Any] | None
) -> Shares:
    """The same on all ranks. AgreedError where the layers do not go round. Collective.

    `example()` gives inputs of a few rows, which rank 0 sends through the model, one layer in memory at a time.
    """
    num_parts = config.stages * (config.chunks or 1)
    if num_parts == 1:
        return Shares([range(len(factories))], [])
    answer: dict = {}
    if mesh.rank == 0:
        try:
            check_stages(len(factories), config.stages, config.chunks or 1, mesh.size)
            answer = _count(config, factories, num_parts, example)
        except ValueError as error:
            answer = {"fault": str(error)}
    answer = mesh.world.broadcast_json(answer)
    if "fault" in answer:
        raise AgreedError(answer["fault"])
    return Shares([range(*part) for part in answer["parts"]], [tuple(pair) for pair in answer["pairs"]])


def _count(config: Config, factories: Sequence, num_parts: int, example: Callable[[], Any] | None) -> dict:
    how = config.stage_split
    inputs = example() if example is not None and how != "parameters" else None
    found = walk(factories, inputs, config.seed, Precision(config.precision), checked_layer)
    if how in WAYS:
        costs = [cost.flops if how == "flops" and inputs is not None else cost.parameters for cost in found.costs]
        parts = partition(costs, num_parts)
    elif how.replace(",", "").replace(" ", "").isdecimal():
        parts = split_by_counts(how, len(factories), num_parts)
    else:
        parts = partition(measured_costs(how, len(factories)), num_parts)
    return {"parts": [[part.start, part.stop] for part in parts], "pairs": found.shared}


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
    except (ValueError, KeyError, TypeError, UnicodeDecodeError):
        raise ValueError(f"--stage-split {path}: no file that `profile` wrote") from None
    if len(costs) != num_layers:
        raise ValueError(f"--stage-split {path}: it has {len(costs)} layers, the model {num_layers}; profile it again")
    return costs
