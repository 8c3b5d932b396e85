"""The channels of one rank to the stages before and behind it, two for each border between groups of layers.

Group q of the model lies on stage q % num_stages, so the border before group q is a link from stage (q - 1) %
num_stages to stage q % num_stages: activations go along it, gradients come back.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hpctrain.comm.channel import Receiver, Sender
from hpctrain.comm.mesh import Mesh
from hpctrain.model.random_state import CPU
from hpctrain.plan.schedule import Op

AHEAD, BACK = 0, 1


class Links:
    """Of a rank of `mesh` with `num_chunks` groups of layers; none where there is one stage. Collective; close it.

    They have a communicator of their own, so several models may share a mesh. What leaves a device arrives on `device`.
    """

    def __init__(self, mesh: Mesh, num_chunks: int = 1, device: torch.device = CPU):
        self._home = None if device.type == "cpu" else device
        self._mesh, self._group = mesh, mesh.add_pipe()
        self._senders: dict[tuple[Op, int], Sender] = {}
        self._receivers: dict[tuple[Op, int], Receiver] = {}
        stage, num_stages = mesh.stage, mesh.grid.num_stages
        for chunk in range(num_chunks if num_stages > 1 else 0):
            if (stage, chunk) != (0, 0):
                before = (stage - 1) % num_stages
                self._receivers[Op.RECV_F, chunk] = self._make(Receiver, before, chunk, AHEAD)
                self._senders[Op.SEND_B, chunk] = self._make(Sender, before, chunk, BACK)
            if (stage, chunk) != (num_stages - 1, num_chunks - 1):
                behind, theirs = (stage + 1) % num_stages, chunk + (stage == num_stages - 1)
                self._senders[Op.SEND_F, chunk] = self._make(Sender, behind, theirs, AHEAD)
                self._receivers[Op.RECV_B, chunk] = self._make(Receiver, behind, theirs, BACK)
        for receiver in self._receivers.values():
            receiver.expect(sys.maxsize)
        mesh.on_close.append(self.close)

    def _make(self, kind: type, peer: int, chunk: int, direction: int) -> Any:
        lane = 2 * chunk + direction
        if kind is Receiver:
            return Receiver(self._group.comm, peer, lane, self._mesh.progress, self._home)
        return Sender(self._group.comm, peer, lane, self._mesh.progress)

    def put(self, op: Op, chunk: int, tensors: list[torch.Tensor], note: Any) -> None:
        """Begins to send; the tensors may not be written to any more."""
        plain = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        self._senders[op, chunk].put(plain, note)

    def take(self, op: Op, chunk: int) -> tuple[list[torch.Tensor], Any]:
        """The next message of the stage before (RECV_F) or behind (RECV_B); its memory is lent until `release`."""
        return self._receivers[op, chunk].take()

    def release(self, op: Op, chunk: int, tensors: list[torch.Tensor]) -> None:
        """Nothing reads what `take` gave any more."""
        self._receivers[op, chunk].release(tensors)

    def watch(self, told: Callable[[str, float, float], None]) -> None:
        """`told(name, began, left)` of each tensor that is sent, the name as SEND_F."""
        for (op, _), sender in self._senders.items():
            sender.on_left = partial(told, op.value)

    @property
    def senders(self) -> list[Sender]:
        return list(self._senders.values())

    @property
    def figures(self) -> tuple[int, int, int]:
        """Bytes, messages and control messages sent so far."""
        return tuple(
            sum(getattr(sender, name) for sender in self.senders)
            for name in ("bytes_sent", "messages_sent", "control_messages")
        )

    def close(self) -> None:
        """Returns when all that was sent has left. What is posted and will not come is taken back. Collective."""
        if self.close not in self._mesh.on_close:
            return
        self._mesh.on_close.remove(self.close)
        for end in (*self._senders.values(), *self._receivers.values()):
            end.close()
        self._mesh.drop(self._group)

    def num_waiting(self, op: Op, chunk: int) -> int:
        """Messages that the stage they were sent to has yet to come to."""
        return self._senders[op, chunk].num_waiting

    def wait_for_room(self, op: Op, chunk: int, num_messages: int) -> None:
        """Returns when no more than so many messages wait for the stage that they were sent to."""
        self._senders[op, chunk].wait_for_room(num_messages)
