"""What a rank holds of a run, as pieces of a checkpoint, and how it takes its part of one: by global names.

weights/NAME                 a parameter; the replicas of its stage share out who writes which
optimizer/NAME/SLOT          what the optimizer keeps of it: a number for each of its own, or one number
buffers/REPLICA/NAME         running statistics and the like, which each replica has its own of
tables/NAME/HOLDER/ids, ...  the rows that a holder has, by ascending id: values, and what the optimizer keeps of them
feedback/REPLICA/NAME        what --compress has left of the gradients of a replica; other numbers of them share it
compressor/NAME              what a compressor begins the next step with
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from hpctrain.plan.grid import split_evenly
from hpctrain.train.checkpoint_files import CheckpointError
from hpctrain.train.checkpoint_pieces import Piece
from hpctrain.train.checkpoint_slots import num_kept, rows_of, slot_pieces, slots_of, state_of
from hpctrain.train.executor import Executor
from hpctrain.train.feedback import FeedbackReduction
from hpctrain.train.lookups import LocalRows


class State:
    """Of this rank, between two steps."""

    def __init__(self, executor: Executor):
        self.executor, self.update, self.mesh = executor, executor.update, executor.update.mesh
        self.shard = getattr(self.update, "shard", None)
        self.parameters = executor.stage.named_parameters()
        self.feedback = self.update.reduction if isinstance(self.update.reduction, FeedbackReduction) else None

    def pieces(self, all_as: int | None = None) -> Iterator[Piece]:
        """What this rank writes: no two ranks write the same. Or all that it holds, what is its own as of replica
        `all_as`.
        """
        replica = self.mesh.replica if all_as is None else all_as
        is_first = all_as is not None or replica == 0  # who has what all replicas hold alike
        own = set(self._own(self.update.tied.own(self.parameters))) if all_as is None else set(self.parameters)
        for name, parameter in self.parameters.items():
            if name in own:
                yield Piece.whole(f"weights/{name}", parameter.detach())
        for name, (parameter, start, whole) in self._stepped().items():
            if self.update.tied.canonical(name) == name and (self.shard is not None or name in own):
                yield from slot_pieces(self.executor.optimizer, parameter, name, start, whole)
        for name, buffer in self.executor.stage.named_buffers().items():
            yield Piece.whole(f"buffers/{replica}/{name}", buffer)
        if is_first:
            yield from self._rows()
        if self.feedback is not None:
            for name, kept in self.feedback.kept().items():
                yield Piece.whole(f"feedback/{replica}/{name}", kept)
            for name, value in self.feedback.memory().items() if is_first else ():
                yield Piece.whole(f"compressor/{name}", value)

    def nbytes(self) -> int:
        """Of the pieces, with what the optimizer will keep of parameters that it has not stepped yet."""
        pieces, missing, optimizer = list(self.pieces()), 0, self.executor.optimizer
        if optimizer is not None and self.update.steps and not optimizer.state:
            weights = sum(each.values.nbytes for each in pieces if each.key.startswith("weights/"))
            missing = num_kept(optimizer) * weights
        return missing + sum(each.values.nbytes for each in pieces)

    def names(self) -> set[str]:
        """Keys of the weights that this rank holds."""
        return {f"weights/{self.update.tied.canonical(name)}" for name in self.parameters}

    def prepare(self, tensors: Mapping[str, torch.Tensor], fresh: bool = False) -> Callable[[], None]:
        """What takes this rank's part over when it is called, and cannot fail. CheckpointError where it is not there,
        or of another model. `fresh`: there are only the values of rows; what the optimizer keeps of them begins anew.
        """
        weights = {name: self._weight(tensors, name, each) for name, each in self.parameters.items()}
        slots, canonical = slots_of(tensors), self.update.tied.canonical
        optimizer = self.executor.optimizer
        states = {
            name: state_of(optimizer, tensors, slots, canonical(name), *each) for name, each in self._stepped().items()
        }
        buffers = self._buffers(tensors)
        kept, memory = self._kept(tensors), self._memory(tensors)
        tables = [table.prepare_state(rows_of(tensors, name), fresh) for name, table in self._tables().items()]

        def take() -> None:
            here = {**self.parameters, **self.executor.stage.named_buffers()}
            with torch.no_grad():
                for name, values in (weights | buffers).items():
                    here[name].copy_(values)
                for values, own in (*kept, *memory):
                    own.copy_(values)
            for name, (parameter, _, _) in self._stepped().items():
                self.executor.optimizer.state[parameter] = states[name]
            for each in tables:
                each()

        return take

    def _own(self, names: Iterable[str]) -> list[str]:
        """Those of the names that this replica writes: about as many bytes as each of the others."""
        names = sorted(names)
        ends, total = [], 0
        for name in names:
            total += self.parameters[name].nbytes
            ends.append(total)
        share = split_evenly(total, self.mesh.grid.num_replicas)[self.mesh.replica]
        return [name for name, end in zip(names, ends) if share.start < end <= share.stop or end == 0 == share.start]

    def _stepped(self) -> dict[str, tuple[nn.Parameter, int, torch.Size]]:
        """What this rank's optimizer steps, by name: where it begins in the whole parameter, and that one's shape."""
        if self.executor.optimizer is None or not self.update.steps:
            return {}
        if self.shard is not None:
            return {
                name: (part, self.shard.starts[name], self.parameters[name].shape)
                for name, part in self.shard.parameters.items()
            }
        return {name: (each, 0, each.shape) for name, each in self.update.gradients.parameters.items()}

    def _rows(self) -> Iterator[Piece]:
        """Which all replicas hold alike."""
        for name, table in self._tables().items():
            for slot, values in table.state().items():
                yield Piece.whole(f"tables/{name}/0/{slot}", values)

    def _tables(self) -> dict:
        lookups = self.update.lookups
        return lookups.source.tables if lookups is not None and isinstance(lookups.source, LocalRows) else {}

    def _weight(self, tensors: Mapping[str, torch.Tensor], name: str, parameter: nn.Parameter) -> torch.Tensor:
        key = f"weights/{self.update.tied.canonical(name)}"
        if key not in tensors:
            raise CheckpointError(f"the checkpoint has no {key}; is it of another task or other options?")
        return _fitting(tensors[key], key, parameter)

    def _buffers(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each replica's own, where there are as many; of other numbers those of the first."""
        found = {}
        for name, buffer in self.executor.stage.named_buffers().items():
            key = f"buffers/{self.mesh.replica}/{name}"
            key = key if key in tensors else f"buffers/0/{name}"
            if key not in tensors:
                raise CheckpointError(f"the checkpoint has no {key}; is it of another task or other options?")
            found[name] = _fitting(tensors[key], key, buffer)
        return found

    def _kept(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What was saved, and where it goes. Replica r takes what r, r + n, ... of those that saved had left, together:
        none of it is lost.
        """
        if self.feedback is None:
            return []
        own, found = self.feedback.kept(), []
        replicas = {int(match[1]) for key in tensors if (match := re.match(r"feedback/(\d{1,9})/", key, re.ASCII))}
        for name, place in own.items():
            total = torch.zeros_like(place)
            for replica in sorted(replicas):
                key = f"feedback/{replica}/{name}"
                if replica % self.mesh.data.size == self.mesh.replica and key in tensors:
                    total += _fitting(tensors[key], key, place).to(place.device)
            found.append((total, place))
        return found

    def _memory(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        own = {} if self.feedback is None else self.feedback.memory()
        saved = [(f"compressor/{name}", place) for name, place in own.items()]
        return [(_fitting(tensors[key], key, place), place) for key, place in saved if key in tensors]


def _fitting(values: torch.Tensor, key: str, wanted: torch.Tensor) -> torch.Tensor:
    if (values.dtype, values.shape) != (wanted.dtype, wanted.shape):
        described = [f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in (values, wanted)]
        raise CheckpointError(f"{key} is {described[0]}, and this model has {described[1]}")
    return values
