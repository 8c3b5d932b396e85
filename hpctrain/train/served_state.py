"""What a server holds, saved and taken over when worker 0 asks for it, between two stretches of a run."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpctrain.comm import messages
from hpctrain.comm.messages import Header
from hpctrain.train import checkpoint_files as files
from hpctrain.train.background import Background, write_noted
from hpctrain.train.checkpoint_pieces import Piece, described, opened, stored
from hpctrain.train.checkpoint_slots import rows_of, slot_pieces, slots_of, state_of
from hpctrain.train.client import ServiceClient
from hpctrain.train.errors import outcome
from hpctrain.train.service import Description
from hpctrain.train.shard import Shard


def ask_servers(client: ServiceClient, question: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each server answers. Of worker 0, when nothing else is under way. CheckpointError where one cannot do it."""
    data = np.frombuffer(json.dumps(question).encode(), np.uint8)
    for line in client.lines:
        line.told = None
        client.tell(line, Header(messages.KEEP, count=len(data)))
        line.post(messages.IDS, data)
    client.progress.wait(lambda: client.poll() or all(line.told is not None for line in client.lines))
    answers = [json.loads(line.told or "{}") for line in client.lines]
    for server, answer in enumerate(answers):
        if "fault" in answer:
            raise files.CheckpointError(f"server {server}: {answer['fault']}")
    return answers


class ServedState:
    """Of the `shard` of one server. Where workers step, servers hold nothing that lasts."""

    def __init__(self, shard: Shard, description: Description, server: int, num_servers: int):
        self._shard, self._server, self._num_servers = shard, server, num_servers
        self._part = description.parts[server]
        self.background = Background()
        self._steps = description.settings.update == "server"

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """What worker 0 hears; under `fault`, in a line, why it cannot be done."""
        answer, fault = outcome(lambda: getattr(self, f"_{question['do']}")(question))
        return answer if fault is None else {"fault": fault}

    def _stand(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Steps that all workers have made, as far as this server knows."""
        return {"step": self._shard.num_complete}

    def _begin(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Goes on with what it has, as if so many were made."""
        self._shard.begin_at(question["clock"])
        return {}

    def _measure(self, question: Mapping[str, Any]) -> dict[str, Any]:
        return {"bytes": sum(each.values.nbytes for each in self._pieces(question["places"]))}

    def _save(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Copies what is to be saved; a thread writes it, and notes that in the folder."""
        part, name = Path(question["folder"]), f"server-{self._server:04d}"
        pieces = list(self._pieces(question["places"]))
        tensors, note = stored(pieces), {"contents": described(pieces), "items_seen": 0}
        self.background.wait()
        self.background.start(lambda: write_noted(part, name, tensors, note))
        return {}

    def _wait(self, question: Mapping[str, Any]) -> dict[str, Any]:
        faults = self.background.wait()
        return {"fault": faults[0]} if faults else {}

    def _load(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """All is looked at before any of it is taken."""
        tensors = opened(Path(question["folder"]), question["anew"])
        dense = self._dense(tensors, question["places"]) if self._steps else []
        fresh, tables = "tables" in question["anew"], self._shard.tables if self._steps else []
        own = self._server, self._num_servers
        takes = [each.prepare_state(rows_of(tensors, each.name, *own), fresh) for each in tables]
        for parameter, values, state in dense:
            parameter.data.copy_(values)
            self._shard.dense.optimizer.state[parameter] = state
        for take in takes:
            take()
        self._shard.begin_at(question["clock"])
        return {}

    def _segments(self, places: Mapping[str, Any]) -> Iterator[tuple]:
        """Parameter of the shard, name, where it begins in the whole one, and that one's shape."""
        for number, segment in enumerate(self._part.segments):
            begin, shape = places[segment.name]
            yield self._shard.dense.parameters[str(number)], segment.name, segment.start - begin, shape

    def _pieces(self, places: Mapping[str, Any]) -> Iterator[Piece]:
        """Of the weights of the dense part the workers hold copies, and save them."""
        if not self._steps:
            return
        for parameter, name, start, shape in self._segments(places):
            yield from slot_pieces(self._shard.dense.optimizer, parameter, name, start, shape)
        for table in self._shard.tables:
            for slot, values in table.state().items():
                yield Piece.whole(f"tables/{table.name}/{self._server}/{slot}", values)

    def _dense(self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, Any]) -> list[tuple]:
        slots, found = slots_of(tensors), []
        for parameter, name, start, shape in self._segments(places):
            key = f"weights/{name}"
            if key not in tensors or list(tensors[key].shape) != list(shape):
                raise files.CheckpointError(f"the checkpoint has no {key} of shape {shape}; is it of another task?")
            values = tensors[key].reshape(-1)[start : start + parameter.numel()]
            found.append(
                (
                    parameter,
                    values,
                    state_of(self._shard.dense.optimizer, tensors, slots, name, parameter, start, shape),
                )
            )
        return found
