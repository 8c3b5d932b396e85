"""One direction of a link between two neighbouring stages: tensors go in on one side and come out on the other.

Sends never block, and the next receive is posted as soon as one is taken, so that it arrives while the stage computes.
What is sent is described (dtypes, shapes, whatever else the receiver needs) only when that changes: each message is
preceded by the number of its description, in sixteen bytes, and a new number by the description itself. A payload
carries the number in its tag, so a receive that was posted for another shape can never take it.

    number (16 bytes) | description, where the number is new | each tensor by itself, from its own memory
"""

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpctrain.comm.buffer import allocate, as_buffer
from hpctrain.comm.progress import Progress, take_back

NUMBER, DESCRIPTION, FIRST_PAYLOAD = 1, 2, 3  # tags, each times the number of channels on a communicator
NUM_PAYLOADS = 64  # tags for payloads; so many descriptions may be under way at once
NUM_TAGS = FIRST_PAYLOAD + NUM_PAYLOADS
FIRST_TAG = 16448  # behind those of a ring on the same communicator
MAX_LANES = (32767 - FIRST_TAG) // NUM_TAGS  # with the tags that every MPI grants


class Sender:
    """Sends to `peer` of `comm`, which must be private to the pipeline; `lane` tells several channels apart."""

    def __init__(self, comm, peer: int, lane: int, progress: Progress):
        self._comm, self._peer, self._tag, self._progress = comm, peer, FIRST_TAG + lane * NUM_TAGS, progress
        self._described: str | None = None
        self._number = 0
        self._sending: deque[tuple[Any, Any, float]] = deque()  # (request, what must stay in memory, when it began)
        self.on_left: Callable[[float, float], None] | None = None  # told when a tensor began to travel, and had left
        self.bytes_sent = self.messages_sent = self.control_messages = 0

    def put(self, tensors: Sequence, note: Any = None) -> None:
        """Begins to send contiguous `tensors` and `note` (JSON). They may not be written to until they have left."""
        described = json.dumps([note, [[_dtype(each), list(each.shape)] for each in tensors]])
        if described != self._described:
            self._described, self._number = described, self._number + 1
            self._control(np.array([self._number, len(described)], np.int64), NUMBER)
            self._control(np.frombuffer(described.encode(), np.uint8), DESCRIPTION)
        else:
            self._control(np.array([self._number, 0], np.int64), NUMBER)
        for tensor in tensors:
            message = _bytes(tensor)
            tag = self._tag + FIRST_PAYLOAD + self._number % NUM_PAYLOADS
            self._sending.append((self._comm.Isend(message, self._peer, tag), (message, tensor), time.perf_counter()))
            self.bytes_sent += message.size
            self.messages_sent += 1
        if self._sending:
            self._progress.add(self)

    def poll(self) -> bool:
        """Lets go of what has left; True when all has."""
        while self._sending and self._sending[0][0].Test():
            _, kept, began = self._sending.popleft()
            if self.on_left is not None and isinstance(kept, tuple):
                self.on_left(began, time.perf_counter())
        return not self._sending

    def close(self) -> None:
        """Returns when all has left."""
        self._progress.wait(self.poll)

    def _control(self, message: np.ndarray, tag: int) -> None:
        self._sending.append((self._comm.Isend(message, self._peer, self._tag + tag), message, 0.0))
        self.control_messages += 1


class Receiver:
    """Receives what a Sender on `peer` sends on the same `lane`, in order, as many as it is told to expect."""

    def __init__(self, comm, peer: int, lane: int, progress: Progress):
        self._comm, self._peer, self._tag, self._progress = comm, peer, FIRST_TAG + lane * NUM_TAGS, progress
        self._left = 0  # receives still to come before `expect` says that there are more
        self._descriptions: dict[int, list] = {}
        self._latest = 0
        self._pool: dict[tuple, list] = {}
        self._number: tuple[Any, np.ndarray] | None = None
        self._payload: tuple[int, list, list] | None = None  # description's number, requests, tensors

    def expect(self, count: int) -> None:
        """So many more messages will come; the first of them is posted now."""
        self._left = count
        self._post()

    def take(self) -> tuple[list, Any]:
        """The next message's tensors, aligned, and its note. They are the receiver's own until `release`."""
        assert self._number is not None, "nothing is expected"
        request, header = self._number
        self._progress.wait(request.Test)
        number, length = map(int, header)
        if length:
            self._learn(number, length)
        if self._payload is None or self._payload[0] != number:
            self._take_back()
            self._post_payload(number)
        _, requests, tensors = self._payload
        self._payload = self._number = None
        for request in requests:
            self._progress.wait(request.Test)
        self._left -= 1
        self._post()
        return tensors, self._descriptions[number][0]

    def release(self, tensors: Sequence) -> None:
        """Nobody reads these any more: their memory may receive what comes next."""
        for tensor in tensors:
            self._pool.setdefault((_dtype(tensor), tuple(tensor.shape)), []).append(tensor)

    def close(self) -> None:
        """Takes back what is posted and will not come."""
        if self._number is not None:
            take_back([self._number[0]])
        self._take_back()
        self._number = None

    def _post(self) -> None:
        if self._left > 0 and self._number is None:
            header = np.zeros(2, np.int64)
            self._number = (self._comm.Irecv(header, self._peer, self._tag + NUMBER), header)
            if self._latest:
                self._post_payload(self._latest)

    def _post_payload(self, number: int) -> None:
        tensors = [self._memory(dtype, shape) for dtype, shape in self._descriptions[number][1]]
        tag = self._tag + FIRST_PAYLOAD + number % NUM_PAYLOADS
        requests = [self._comm.Irecv(_bytes(tensor), self._peer, tag) for tensor in tensors]
        self._payload = (number, requests, tensors)

    def _take_back(self) -> None:
        if self._payload is not None:
            _, requests, tensors = self._payload
            take_back(requests)
            self.release(tensors)
            self._payload = None

    def _learn(self, number: int, length: int) -> None:
        text = np.empty(length, np.uint8)
        self._progress.wait(self._comm.Irecv(text, self._peer, self._tag + DESCRIPTION).Test)
        self._descriptions = {number: json.loads(text.tobytes())}
        self._latest = number

    def _memory(self, dtype: str, shape: list[int]):
        import torch

        free = self._pool.get((dtype, tuple(shape)))
        if free:
            return free.pop()
        kind = getattr(torch, dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return torch.from_numpy(allocate(size)).view(kind).view(shape)


def _bytes(tensor) -> np.ndarray:
    buffer = as_buffer(tensor)
    return buffer.message(0, len(buffer))


def _dtype(tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
