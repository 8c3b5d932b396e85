"""`hpctrain export RUN OUT.safetensors`: a run's weights as a program without hpctrain loads them.

Names are those of the module itself, or, for a task that is a list of layers, of torch.nn.Sequential over them
(`3.weight`). Tied weights are written under each of their names, so that load_state_dict finds every key.
"""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.config import Parser
from hpctrain.tasks.load import short_name
from hpctrain.tools.alone import on_rank_0
from hpctrain.tools.new_file import check_new
from hpctrain.train.saved import read_config, read_weights


def run(argv: list[str], world) -> int:
    """Writes the file on rank 0. Returns 0, or 2 with one line for what cannot be. Collective."""
    return on_rank_0(world, lambda: _export(argv))


def parser() -> Parser:
    top = Parser("hpctrain export", add_help=False)
    top.add_argument("run", metavar="RUN", help="the folder of a finished run")
    top.add_argument("out", metavar="OUT.safetensors", help="a new file")
    return top


def _export(argv: list[str]) -> str | None:
    try:
        asked = parser().parse(argv)
        folder, out = Path(asked["run"]), Path(asked["out"])
        check_new(out)
        _write(folder, out)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or asked['out']}: {error.strerror or error}"
    return None


def _write(folder: Path, out: Path) -> None:
    """From the file alone: neither the task nor its data need to be there any more."""
    config = read_config(folder)
    from hpctrain.model.weights import save_weights

    tensors, notes = read_weights(folder)
    aliases = json.loads(notes.get("aliases", "{}"))
    tensors |= {name: tensors[first].clone() for name, first in aliases.items()}  # safetensors shares no memory
    if notes.get("names") == "layers":
        tensors = {name.removeprefix("layers."): tensor for name, tensor in tensors.items()}
    save_weights(tensors, out)
    print(f"{len(tensors)} tensors of {short_name(config.task)} in {out}; load_state_dict(load_file(...)) takes them")
