"""The weights at the end of a run: found equal where they should be, brought together on rank 0, and saved."""

import json
import sys
from pathlib import Path

import torch

from hpctrain.comm.channel import Receiver, Sender
from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.model.stage import Stage
from hpctrain.model.weights import combined, fingerprints, save_weights
from hpctrain.train.build import build_model
from hpctrain.train.errors import AgreedError, agreed
from hpctrain.train.executor import Executor
from hpctrain.train.lookups import LocalRows
from hpctrain.train.start import raise_where_different
from hpctrain.train.tables import whole_table

DRIFTED = "holds different weights at the end"


def final_weights(config: Config, task, executor: Executor, mesh: Mesh) -> tuple[Stage | None, dict, str]:
    """The whole model on rank 0 (None elsewhere), running statistics averaged, and the fingerprint of the weights.

    Between the two the tables by name, whole, on rank 0; empty elsewhere, or where there are none.

    Raises AgreedError where replicas, or copies of one parameter on several stages, drifted apart. Collective.
    """
    stage, update = executor.stage, executor.update
    own = {update.tied.canonical(name): tensor for name, tensor in stage.named_parameters().items()}
    lines, tables = fingerprints(own), whole_tables(executor) if mesh.rank == 0 else {}
    with agreed(mesh.everybody):
        raise_where_different(mesh.data, lines + fingerprints(touched_rows(executor)), DRIFTED)
    lines += fingerprints(tables)
    note_other_buffers(executor, mesh)
    everything = sorted({line for part in mesh.everybody.all_gather_json(lines) for line in part})
    names = [line.split()[0] for line in everything]
    for name, following in zip(names, names[1:]):
        if name == following:
            raise AgreedError(f"{name} and its copies on other stages are different at the end")
    with update.statistics.averaged(update.items_seen), agreed(mesh.everybody):
        model = bring_together(config, task, executor, mesh)
    return model, tables, combined(everything)


def whole_tables(executor: Executor) -> dict[str, torch.Tensor]:
    """All rows of each table, by name."""
    lookups = executor.update.lookups
    modules = {} if lookups is None else lookups.modules
    return {name: whole_table(module, lookups.dtype) for name, module in modules.items()}


def touched_rows(executor: Executor) -> dict[str, torch.Tensor]:
    """Of tables in this rank's own memory, which are to be the same on all: the rows that exist."""
    lookups = executor.update.lookups
    if lookups is None or not isinstance(lookups.source, LocalRows):
        return {}
    return {f"{name} rows": table.fingerprint_rows()[1] for name, table in lookups.source.tables.items()}


def bring_together(config: Config, task, executor: Executor, mesh: Mesh) -> Stage | None:
    """The whole model on rank 0, None elsewhere: a model of its own, unless this rank holds all layers anyway."""
    stage = executor.stage
    if mesh.grid.num_stages == 1:
        return stage if mesh.rank == 0 else None
    canonical = executor.update.tied.canonical
    state = {name: tensor.detach() for name, tensor in stage.state().items() if canonical(name) == name}
    if mesh.rank != 0:
        if mesh.replica == 0:
            sender = Sender(mesh.world.comm, 0, 0, mesh.progress)
            sender.put([tensor.cpu().contiguous() for tensor in state.values()], list(state))
            sender.close()
        return None
    for number in range(1, mesh.grid.num_stages):
        receiver = Receiver(mesh.world.comm, mesh.grid.rank(number, 0), 0, mesh.progress)
        receiver.expect(1)
        tensors, names = receiver.take()
        state |= dict(zip(names, tensors))
        receiver.close()
    model = build_model(config, task)
    with torch.no_grad():
        for name, tensor in model.state().items():
            tensor.copy_(state[name])
    return model


def save(model: Stage, tables: dict[str, torch.Tensor], folder: Path) -> None:
    """Writes model.safetensors, the tables whole."""
    notes = {"names": "module" if model.is_module else "layers", "aliases": json.dumps(model.aliases())}
    save_weights({**model.state(), **tables}, folder / "model.safetensors", notes)


def note_other_buffers(executor: Executor, mesh: Mesh) -> None:
    """Says where replicas hold other buffers, running statistics aside, whose mean is known. Collective."""
    averaged = tuple(f"{name}." for name in executor.update.statistics.names)
    buffers = {name: each for name, each in executor.stage.named_buffers().items() if not name.startswith(averaged)}
    everybody = mesh.data.all_gather_json(fingerprints(buffers))
    differing = [line.split()[0] for line in everybody[0] if any(line not in theirs for theirs in everybody)]
    told = [name for part in mesh.everybody.all_gather_json(differing[:1]) for name in part]
    if told and mesh.rank == 0:
        print(f"note: buffer {told[0]} differs between the replicas; that of replica 0 is saved", file=sys.stderr)
