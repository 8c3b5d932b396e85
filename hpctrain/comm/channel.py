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
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.comm.cuda_aware import takes_device_memory
from hpctrain.comm.parcels import Arrival, Memory, Parcel, dtype_name, parcel_of
from hpctrain.comm.progress import Progress, take_back
from hpctrain.comm.tags import CHANNELS

if TYPE_CHECKING:
    import torch

NUMBER, DESCRIPTION, FIRST_PAYLOAD = 1, 2, 3  # a channel's tags
NUM_PAYLOADS = 64  # tags for payloads
NUM_TAGS = FIRST_PAYLOAD + NUM_PAYLOADS
MAX_LANES = len(CHANNELS) // NUM_TAGS


class Sender:
    """Sends to `peer` of `comm`, which must be private to the pipeline; `lane` tells several channels apart.

    A number is sent so that it has left when the receiver has come to it: then nothing before it is under way.
    """

    def __init__(self, comm, peer: int, lane: int, progress: Progress):
        self._comm, self._peer, self._tag, self._progress = comm, peer, CHANNELS[lane * NUM_TAGS], progress
        self._described: str | None = None
        self._number = 0
        self._numbers: deque[tuple[Any, np.ndarray]] = deque()  # (request, what must stay in memory)
        self._descriptions: deque[tuple[Any, np.ndarray]] = deque()
        self._waiting: deque[tuple[Parcel, int]] = deque()  # and the tag: tensors whose device has not come there
        self._tensors: deque[Parcel] = deque()
        self._takes_device_memory = cache(partial(takes_device_memory, comm, progress))
        self.on_left: Callable[[float, float], None] | None = None  # told when a tensor began to travel, and had left
        self.bytes_sent = self.messages_sent = self.control_messages = 0
        self.direct_bytes = self.staged_bytes = 0  # of bytes_sent, from a device: as they were, by way of the host

    def put(self, tensors: Sequence, note: Any = None) -> None:
        """Begins to send contiguous `tensors` and `note` (JSON). They may not be written to until they have left.

        Waits where so many new descriptions are under way that tags would come again.
        """
        described = json.dumps([note, [[dtype_name(e), list(e.shape), e.device.type != "cpu"] for e in tensors]])
        is_new = described != self._described
        if is_new:
            self.wait_for_room(NUM_PAYLOADS // 2)
            self._described, self._number = described, self._number + 1
        number = np.array([self._number, len(described) if is_new else 0], np.int64)
        self._numbers.append((self._comm.Issend(number, self._peer, self._tag + NUMBER), number))
        if is_new:
            text = np.frombuffer(described.encode(), np.uint8)
            self._descriptions.append((self._comm.Isend(text, self._peer, self._tag + DESCRIPTION), text))
        self.control_messages += 1 + is_new
        tag = self._tag + FIRST_PAYLOAD + self._number % NUM_PAYLOADS
        for tensor in tensors:
            parcel = parcel_of(tensor, self._takes_device_memory)
            self._waiting.append((parcel, tag))
            self._count(parcel)
        self._send()
        self._progress.add(self)

    def _count(self, parcel: Parcel) -> None:
        self.bytes_sent += parcel.message.size
        self.direct_bytes += parcel.message.size * (parcel.path == "direct")
        self.staged_bytes += parcel.message.size * (parcel.path == "staged")
        self.messages_sent += 1

    def _send(self) -> None:
        """In the order in which they were put, for those of one number have one tag."""
        while self._waiting and self._waiting[0][0].poll():
            parcel, tag = self._waiting.popleft()
            parcel.request = self._comm.Isend(parcel.message, self._peer, tag)
            self._tensors.append(parcel)

    def poll(self) -> bool:
        """Lets go of what has left; True when all has."""
        for sending in (self._numbers, self._descriptions):
            while sending and sending[0][0].Test():
                sending.popleft()
        self._send()
        while self._tensors and self._tensors[0].request.Test():
            parcel = self._tensors.popleft()
            parcel.release()
            if self.on_left is not None:
                self.on_left(parcel.began, time.perf_counter())
        return not (self._numbers or self._descriptions or self._waiting or self._tensors)

    @property
    def num_waiting(self) -> int:
        """Messages that the receiver has yet to come to."""
        self.poll()
        return len(self._numbers)

    def wait_for_room(self, num_messages: int) -> None:
        """Returns when the receiver has yet to come to no more than so many messages."""

        if self.num_waiting > num_messages:
            self._progress.wait(lambda: self.num_waiting <= num_messages)

    def close(self) -> None:
        """Returns when all has left."""
        self._progress.wait(self.poll)


class Receiver:
    """Receives what a Sender on `peer` sends on the same `lane`, in order, as many as it is told to expect.

    What left a device comes to `home`, a device of torch, or to the host where that is None.
    """

    def __init__(self, comm, peer: int, lane: int, progress: Progress, home: "torch.device | None" = None):
        self._comm, self._peer, self._tag, self._progress = comm, peer, CHANNELS[lane * NUM_TAGS], progress
        self._left = 0  # receives still to come before `expect` says that there are more
        self._descriptions: dict[int, list] = {}
        self._latest = 0
        self._memory = Memory(home, cache(partial(takes_device_memory, comm, progress)))
        self._number: tuple[Any, np.ndarray] | None = None
        self._payload: tuple[int, list[Arrival]] | None = None  # and its description's number

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
        arrivals = self._payload[1]
        self._payload = self._number = None
        for arrival in arrivals:
            self._progress.wait(arrival.poll)
            arrival.release()
        self._left -= 1
        self._post()
        return [arrival.tensor for arrival in arrivals], self._descriptions[number][0]

    def poll(self) -> bool:
        """Brings to the device what has arrived for it; True when nothing is expected there."""
        arrivals = self._payload[1] if self._payload else []
        return not [arrival for arrival in arrivals if not arrival.poll()]

    def release(self, tensors: Sequence) -> None:
        """Nobody reads these any more: their memory may receive what comes next."""
        for tensor in tensors:
            self._memory.release(tensor)

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
        arrivals = [self._memory.arrival(self._key(*each)) for each in self._descriptions[number][1]]
        tag = self._tag + FIRST_PAYLOAD + number % NUM_PAYLOADS
        for arrival in arrivals:
            arrival.request = self._comm.Irecv(arrival.message, self._peer, tag)
        self._payload = (number, arrivals)
        if self._memory.home is not None:
            self._progress.add(self)

    def _take_back(self) -> None:
        if self._payload is not None:
            arrivals = self._payload[1]
            take_back([arrival.request for arrival in arrivals])
            for arrival in arrivals:
                arrival.give_up()
            self.release([arrival.tensor for arrival in arrivals])
            self._payload = None

    def _learn(self, number: int, length: int) -> None:
        text = np.empty(length, np.uint8)
        self._progress.wait(self._comm.Irecv(text, self._peer, self._tag + DESCRIPTION).Test)
        self._descriptions = {number: json.loads(text.tobytes())}
        self._latest = number
        self._memory.want({self._key(*each) for each in self._descriptions[number][1]})

    def _key(self, dtype: str, shape: list[int], left_device: bool) -> tuple:
        """Of the memory that it comes to."""
        return dtype, tuple(shape), left_device and self._memory.home is not None
