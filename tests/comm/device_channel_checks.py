"""The law of channels on devices, as a function that returns what is wrong: what is taken is what was put.

It is used on the code as it is, and on code with a planted bug. Collective; `path` as in device_checks.
"""

import math
import random
from contextlib import contextmanager

import numpy as np
import torch

from hpctrain.comm.channel import Receiver, Sender
from hpctrain.comm.progress import Progress
from tests.comm.pretend import DEVICE, Pretended, pretended, rubbish
from tests.comm.stand_in import DeviceArray, GuardedComm, StandIn

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
SHAPES = ((), (0,), (7,), (3, 40), (2, 500))


class Talk:
    """One rank of two: computes on a stream of its own what it puts, and reads on it what it takes."""

    def __init__(self, comm, path: str, seed: int):
        self._library = StandIn(seed + comm.rank, looks=4, is_for_mpi=path == "direct")
        self._stream, self.problems = self._library.cuda.Stream(), self._library.problems
        self._read: list[tuple[str, DeviceArray, torch.Tensor]] = []
        guarded, peer, progress = GuardedComm(comm, self._library), 1 - comm.rank, Progress()
        self.sender = Sender(guarded, peer, comm.rank, progress)
        self.receiver = Receiver(guarded, peer, peer, progress, DEVICE)
        self.receiver.expect(1 << 30)

    @contextmanager
    def on_stream(self):
        with pretended(self._library), self._library.cuda.Device(0), self._stream:
            yield

    def put(self, values: list[tuple[torch.Tensor, bool]], note: int) -> None:
        """Tensors of the host, and whether each is to be on the device, where it is computed yet as it is put."""
        with self.on_stream():
            self.sender.put([self._computed(each) if is_there else each for each, is_there in values], note)

    def take(self, values: list[tuple[torch.Tensor, bool]], note: int) -> None:
        """They are these; what reads those of the device is told, and then they are released."""
        with self.on_stream():
            tensors, told = self.receiver.take()
            if told != note:
                self.problems.append(f"message {told} came in place of {note}")
            for tensor, (wanted, is_there) in zip(tensors, values, strict=True):
                if isinstance(tensor, Pretended) != is_there or tensor.dtype != wanted.dtype:
                    self.problems.append(f"message {note}: {tensor.dtype} on {tensor.device}")
                elif is_there:
                    self._tell_to_read(note, tensor, wanted)
                elif not same(tensor, wanted):
                    self.problems.append(f"message {note}: {tensor} in place of {wanted}")
            self.receiver.release(tensors)

    def end(self) -> list[str]:
        with pretended(self._library):
            self.sender.close()
            self.receiver.close()
        self._library.finish()
        for note, copy, wanted in self._read:
            if not np.array_equal(copy.host, bytes_of(wanted)):
                self.problems.append(f"message {note}: other numbers came to the device")
        return self.problems

    def _computed(self, value: torch.Tensor) -> torch.Tensor:
        memory = rubbish(value.nbytes)
        DeviceArray(self._library, memory.on_host.numpy())[:] = self._library.array(bytes_of(value))
        return memory.view(value.dtype).view(value.shape)

    def _tell_to_read(self, note: int, tensor: Pretended, wanted: torch.Tensor) -> None:
        copy = self._library.array(np.zeros(tensor.on_host.nbytes, np.uint8))
        copy[:] = DeviceArray(self._library, bytes_of(tensor.on_host))
        self._read.append((note, copy, wanted))


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and np.array_equal(bytes_of(one), bytes_of(other))


def messages(seed: int, rank: int, count: int) -> list[list[tuple[torch.Tensor, bool]]]:
    """What a rank puts: mostly like the message before it, so that memory is used again."""
    drawn, generator = random.Random(2 * seed + rank), torch.Generator().manual_seed(2 * seed + rank)
    found, kinds = [], []
    for _ in range(count):
        if not kinds or drawn.random() < 0.3:
            kinds = [(drawn.choice(DTYPES), drawn.choice(SHAPES), drawn.random() < 0.7) for _ in range(3)]
        numbers = (torch.randint(0, 100, shape, generator=generator) for _, shape, _ in kinds)
        found.append([(each.to(dtype), is_there) for each, (dtype, _, is_there) in zip(numbers, kinds, strict=True)])
    return found


def conversation(comm, path: str, seed: int, count: int = 8) -> list[str]:
    """Ranks 0 and 1 tell each other at once, several messages are under way; all others do nothing."""
    if comm.rank > 1 or comm.size == 1:
        return []
    talk, ahead = Talk(comm, path, seed), random.Random(seed).randint(0, 3)
    own, theirs = (messages(seed, rank, count) for rank in (comm.rank, 1 - comm.rank))
    for number in range(count + ahead):
        if number < count:
            talk.put(own[number], number)
        if number >= ahead:
            talk.take(theirs[number - ahead], number - ahead)
    problems = talk.end()
    moved = sum(math.prod(each.shape) * each.itemsize for message in own for each, is_there in message if is_there)
    counted = {"direct": talk.sender.direct_bytes, "staged": talk.sender.staged_bytes}
    if counted != {"direct": 0, "staged": 0, path: moved}:
        problems.append(f"{counted} were counted, of {moved} bytes {path}")
    return [f"seed {seed}, {path}: {problem}" for problem in problems]
