"""What ranks that lost others go on from: the state after the last step that all who are left agree on, from memory.

Where workers step, they all hold the same weights: one of them may have made a step that the others have not heard of
yet, and then its state is everybody's. Where servers step, they hold the weights; what was pushed to them beyond the
last step that is whole on all of them counts, and the rows of that step are trained on again.
"""

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from hpctrain.comm.mesh import Mesh
from hpctrain.plan.program import ALL, NOTHING
from hpctrain.train.checkpoint_pieces import DTYPES, Piece, described
from hpctrain.train.errors import on_first
from hpctrain.train.served_state import ask_servers
from hpctrain.train.train_state import TrainState

if TYPE_CHECKING:
    from hpctrain.train.trainer import Trainer

Tensors = dict[str, torch.Tensor]
OWN = ("buffers/", "feedback/")  # what each replica has for itself


def regain(old: "Trainer", new: "Trainer") -> TrainState:
    """`new` takes over what `old`, of the ranks before, has come to. Collective over the ranks of `new`, with servers
    that answer.
    """
    mesh, update = new.mesh, new.executor.update
    counts = 0  # whose counts are those of the step
    if update.steps:
        made = mesh.world.all_gather_json(old.executor.update.num_made(old.state.step))
        step = max(made)
        if made[mesh.rank] == step:
            old.executor.update.forget_step()
        leader = made.index(step)
        counts = leader if update.served != ALL else 0
        tensors = _everybodys(_held(old, mesh.replica), leader, mesh, is_needed=min(made) < step)
    else:
        tensors = _held(old, mesh.replica)
        stands = on_first(mesh.world, lambda: ask_servers(update.client, {"do": "stand"}))
        step = min(each["step"] for each in stands)
    new.checkpoints.state.prepare(tensors)()
    if update.served != NOTHING:
        on_first(mesh.world, lambda: ask_servers(update.client, {"do": "begin", "clock": step}))
    update.begin_at(step)
    update.read_again(step)
    update.items_seen = old.executor.update.items_seen
    new.resumed_from = old.resumed_from
    new.checkpoints.count_on_from(old.checkpoints)
    state, line = _state_at(step, old, mesh, counts)
    new.last_line = line if update.served != ALL else None  # of workers that push each has noted its own
    return state


def _held(old: "Trainer", replica: int) -> Tensors:
    """All that this rank has, under the number that it has as a replica now."""
    pieces = old.checkpoints.state.pieces(all_as=replica)
    return {each.key: each.values.detach().reshape(each.shape) for each in pieces}


def _everybodys(held: Tensors, leader: int, mesh: Mesh, is_needed: bool) -> Tensors:
    """What is not a replica's own as the leader has it. Collective."""
    if not is_needed:
        return held
    own = {key: each for key, each in held.items() if key.startswith(OWN)}
    shared = {key: each for key, each in held.items() if key not in own}
    for each in mesh.world.broadcast_json(described(itertools.starmap(Piece.whole, shared.items())), leader):
        key, is_own = each["key"], mesh.rank == leader
        own[key] = shared[key].cpu().contiguous() if is_own else torch.empty(each["shape"], dtype=DTYPES[each["dtype"]])
        mesh.world.broadcast(own[key], leader)
    return own


def _state_at(step: int, old: "Trainer", mesh: Mesh, counts: int) -> tuple[TrainState, dict | None]:
    """Of `step`, as rank `counts` has it, and what is noted of that step if it knows."""
    told = None
    if mesh.rank == counts:
        state, count, line = old.state, old.executor.batches.sampler.num_rows_of, old.last_line
        rows = state.rows + sum(map(count, range(state.step, step))) - sum(map(count, range(step, state.step)))
        told = [replace(state, step=step, rows=rows).told(), line if line and line["step"] == step else None]
    state, line = mesh.world.broadcast_json(told, counts)
    return TrainState(**state), line
