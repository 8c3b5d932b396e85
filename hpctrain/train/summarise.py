"""What summary.json says of a run, put together from all ranks."""

import sys
from collections.abc import Callable

import torch

from hpctrain.comm.clock import Clock
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.ring import Counters
from hpctrain.config import Config
from hpctrain.plan.program import ALL
from hpctrain.train import facts
from hpctrain.train.checked import checked_baseline
from hpctrain.train.executor import Executor
from hpctrain.train.optimizer import state_bytes
from hpctrain.train.pipeline_summary import pipeline_figures
from hpctrain.train.service_summary import service_figures
from hpctrain.train.trainer import Trainer
from hpctrain.train.tuned import figures


def summarise(
    config: Config,
    task,
    trainer: Trainer,
    mesh: Mesh,
    hashes: dict,
    clock: Clock,
    metrics: dict[str, float],
    servers: list[dict],
) -> dict:
    """The summary of a finished run, on every rank. Collective."""
    executor, grid = trainer.executor, mesh.grid
    waited = executor.batches.seconds / trainer.state.seconds if trainer.state.seconds else 0.0
    own = [*sent(executor, mesh), facts.peak_memory_bytes()]
    by_rank = mesh.world.all_gather_json([*own, waited, state_bytes(executor.optimizer)])
    data_share, optimizer_bytes = ([each[place] for each in by_rank] for place in (-2, -1))
    by_rank = [each[:-2] for each in by_rank] + [[*each["sent"], each["memory"]] for each in servers]
    bytes_sent, messages, control, memory = map(list, zip(*by_rank))
    layout = {"stages": grid.num_stages, "replicas": grid.num_replicas, "servers": len(servers), "ranks": len(by_rank)}
    return {
        "done": True,
        "task": config.task,
        "layout": layout,
        "schedule": config.schedule if grid.num_stages > 1 else None,
        **trainer.figures(),
        "data_waiting_share": data_share,
        "baseline": or_note("baseline", lambda: checked_baseline(task.baseline()))
        if mesh.rank == 0 and hasattr(task, "baseline")
        else None,
        "eval": metrics,
        "bytes_sent_per_rank": bytes_sent,
        "messages_sent_per_rank": messages,
        "control_messages_per_rank": control,
        **device_figures(executor, mesh),
        "allreduce": executor.update.reduction.figures() if executor.update.served != ALL else None,
        "tuning": figures(config),
        "checkpoints": trainer.checkpoints.figures() if trainer.checkpoints else None,
        **pipeline_figures(executor, clock.offset, trainer.longest_run, mesh),
        **service_figures(config, executor, trainer.state.seconds, servers, mesh),
        "peak_memory_bytes": memory,
        "optimizer_state_bytes": optimizer_bytes,
        "weights_sha256": hashes["weights_sha256"],
        "environment": facts.environment(mesh, config.threads, hashes["data_sha256"], executor.stage.device),
    }


def sent(executor: Executor, mesh: Mesh) -> list[int]:
    """Bytes, messages and control messages of this rank."""
    by_ring = [(each.bytes_sent, each.messages_sent, each.control_messages) for each in counters_of(mesh)]
    client = getattr(executor.update, "client", None)
    if client is not None:
        by_ring.append((client.outbox.bytes_sent, client.outbox.messages_sent, client.outbox.control_messages))
    return [sum(each) for each in zip(executor.passes.links.figures, *by_ring)]


def counters_of(mesh: Mesh) -> list[Counters]:
    """Of all rings that a run sends along."""
    groups = [mesh.data, *mesh.parts, *([] if mesh.everybody is mesh.data else [mesh.everybody])]
    return [each.ring.counters for each in groups]


def device_figures(executor: Executor, mesh: Mesh) -> dict:
    """What all ranks sent of memory of devices, by way of the host's and without; by rank the most that torch took of
    its device, None where there is none. Collective.
    """
    device, own = executor.stage.device, [0, 0, None]
    if device.type != "cpu":
        senders = [*counters_of(mesh), *executor.passes.links.senders]
        client = getattr(executor.update, "client", None)
        pushed = 0 if client is None else client.outbox.bytes_sent  # by way of the host, where servers keep all
        staged = pushed + sum(each.staged_bytes for each in senders)
        own = [
            staged,
            sum(each.direct_bytes for each in senders),
            getattr(torch, device.type).max_memory_allocated(device),
        ]
    staged, direct, peaks = zip(*mesh.world.all_gather_json(own))
    return {"staged_bytes": sum(staged), "direct_bytes": sum(direct), "peak_device_bytes": list(peaks)}


def or_note(member: str, call: Callable):
    """What an ornament of the task gives; a note and None where it fails, for the run itself is whole."""
    try:
        return call()
    except Exception as error:
        print(f"note: no {member}: {type(error).__name__}: {error}", file=sys.stderr)
        return None
