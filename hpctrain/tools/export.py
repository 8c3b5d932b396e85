"""`hpctrain export RUN OUT.safetensors`: a run's weights as a program without hpctrain loads them.

Names are those of the module itself, or, for a task that is a list of layers, of torch.nn.Sequential over them
(`3.weight`). Tied weights are written under each of their names, so that load_state_dict finds every key.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Parser, UsageError
from hpctrain.train.errors import AgreedError
from hpctrain.train.saved import load_weights, read_config


def run(argv: list[str], world) -> int:
    """Writes the file on rank 0. Returns 0, or 2 with one line for what cannot be. Collective."""
    with Mesh(world) as mesh:
        fault = mesh.world.broadcast_json(_export(argv) if mesh.rank == 0 else None)
    if fault and mesh.rank == 0:
        print(f"hpctrain: {fault}", file=sys.stderr)
    return 2 if fault else 0


def parser() -> Parser:
    top = Parser("hpctrain export", add_help=False)
    top.add_argument("run", metavar="RUN", help="the folder of a finished run")
    top.add_argument("out", metavar="OUT.safetensors", help="a new file")
    return top


def _export(argv: list[str]) -> str | None:
    try:
        asked = parser().parse(argv)
        folder, out = Path(asked["run"]), Path(asked["out"])
        if out.exists() or not out.parent.is_dir():
            raise UsageError(f"{out}: " + ("exists already; name a new file" if out.exists() else "no such folder"))
        _write(folder, out)
    except (ValueError, AgreedError) as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or asked['out']}: {error.strerror or error}"
    return None


def _write(folder: Path, out: Path) -> None:
    config = read_config(folder)
    from torch import nn

    from hpctrain.model.weights import save_weights
    from hpctrain.tasks.load import build_task
    from hpctrain.train.build import build_model

    stage = build_model(config, build_task(config.task, config.task_option, config.data))
    load_weights(stage.state(), folder)
    whole = stage.layers[0] if stage.is_module else nn.Sequential(*stage.layers)
    tensors = {
        name: tensor.clone() for name, tensor in whole.state_dict().items()
    }  # safetensors takes no shared memory
    save_weights(tensors, out)
    print(
        f"{len(tensors)} tensors in {out}; torch.nn.Module.load_state_dict(safetensors.torch.load_file(...)) takes them"
    )
