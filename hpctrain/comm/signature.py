"""Do all ranks make the same call?

Ranks that disagree about the next collective hang, or add numbers that have nothing to do with each other. So the
first thing a rank sends to its right neighbour in a call is a signature: call number, operation, dtype, length, name.
Whoever sees two that differ tells the ring, and every rank ends with an error that names both.

No rank can finish a call along the ring before word of agreement has come all the way round: what it needs from its
left neighbour depends on what that one received from its own, and nobody touches data before the signature that
announced it was compared. Calls that go other ways take only what belongs to them: one_shot and doubling by a tag that
comes from the signature, sums in shared memory by a stamp on each rank's board.
"""

import hashlib
import struct
from collections.abc import Callable
from typing import NamedTuple, NoReturn

import numpy as np

from hpctrain.comm.progress import take_back
from hpctrain.comm.tags import SIGNATURE

HEADER = struct.Struct("<iq")  # of a signature: rank and call
_SIGNATURE = struct.Struct(HEADER.format + "16s16sq64s")
_MESSAGE = struct.Struct(f"<ii{_SIGNATURE.size}s{_SIGNATURE.size}s")  # kind, rank that detected, two signatures
_ANNOUNCE, _DISAGREE = 1, 2


class CollectiveMismatch(RuntimeError):
    """Ranks made different collective calls. Raised on every rank of the ring, with both calls."""


class Signature(NamedTuple):
    """What one rank says about its next collective call."""

    rank: int
    call: int
    operation: str
    dtype: str
    length: int
    name: str

    def pack(self) -> bytes:
        operation, dtype, name = _fit(self.operation, 16), _fit(self.dtype, 16), _fit(self.name, 64)
        return _SIGNATURE.pack(self.rank, self.call, operation, dtype, self.length, name)

    def words(self) -> bytes:
        """All of it but who calls and when, packed."""
        return self.pack()[HEADER.size :]

    @classmethod
    def unpack(cls, data: bytes) -> "Signature":
        rank, call, operation, dtype, length, name = _SIGNATURE.unpack(data)
        text = [field.rstrip(b"\0").decode(errors="replace") for field in (operation, dtype, name)]
        return cls(rank, call, text[0], text[1], length, text[2])

    def agrees(self, other: "Signature") -> bool:
        return self.pack()[4:] == other.pack()[4:]

    def __str__(self):
        name = f" '{self.name}'" if self.name else ""
        operation = self.operation.replace("/", " divided by ")
        return f"rank {self.rank} call {self.call} {operation}{name} ({self.dtype} x {self.length})"


def _fit(text: str, size: int) -> bytes:
    """`text` in at most `size` bytes; of a longer one the beginning and a hash, so that others stay different."""
    data = text.encode()
    return data if len(data) <= size else data[: size - 9] + b"~" + hashlib.sha256(data).hexdigest()[:8].encode()


class SignatureChannel:
    """Signatures from the left neighbour, to the right one. Part of a ring of at least two ranks."""

    def __init__(self, comm):
        self._comm = comm
        self._rank = comm.rank
        self._right, self._left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        self._incoming = np.empty(_MESSAGE.size, np.uint8)
        self._receive = None
        self._sends = []  # (request, buffer): a buffer lives until MPI has taken it
        self._arrived: dict[int, Signature] = {}
        self._broken: str | None = None
        self.disagreement: tuple[Signature, Signature] | None = None

    def listen(self) -> None:
        """From here on the left neighbour's word arrives; raises at once on a ring that is broken already."""
        if self._broken:
            raise CollectiveMismatch(self._broken)
        if self._receive is None:
            self._post()

    def announce(self, own: Signature) -> None:
        """Tells the right neighbour; after `listen`."""
        self._send(_MESSAGE.pack(_ANNOUNCE, own.rank, own.pack(), b""))

    def confirmed(self, own: Signature) -> bool:
        """Whether the left neighbour announced the same call; raises CollectiveMismatch when it announced another."""
        left = self._arrived.pop(own.call, None)
        if left is None:
            self.poll()
            left = self._arrived.pop(own.call, None)
        if left is None:
            return False
        if not own.agrees(left):
            self.refuse(left, own)
        return True

    def compare(self, call: int, own: Callable[[], Signature]) -> None:
        """Raises CollectiveMismatch where the left neighbour announced this call, which needs no announcement."""
        if call in self._arrived:
            self.refuse(self._arrived[call], own())

    def refuse(self, left: Signature, own: Signature) -> NoReturn:
        """Tells everybody that two calls differ, and raises CollectiveMismatch."""
        self._send(_MESSAGE.pack(_DISAGREE, self._rank, left.pack(), own.pack()))
        self._fail(left, own)

    def poll(self) -> None:
        """Takes what has arrived; a disagreement that others found is passed on and raised here as well."""
        if self._broken:
            raise CollectiveMismatch(self._broken)
        while self._receive is not None and self._receive.Test():
            kind, origin, first, second = _MESSAGE.unpack(self._incoming.tobytes())
            if kind == _DISAGREE:
                self._receive = None
                if self._right != origin:
                    self._send(_MESSAGE.pack(kind, origin, first, second))
                self._fail(Signature.unpack(first), Signature.unpack(second))
            signature = Signature.unpack(first)
            self._arrived[signature.call] = signature
            self._post()

    def drained(self) -> bool:
        """Whether every message that was sent has left."""
        self._sends = [(request, data) for request, data in self._sends if not request.Test()]
        return not self._sends

    @property
    def broken(self) -> bool:
        return self._broken is not None

    def abandon(self) -> None:
        """Takes back the receive for a call that does not come."""
        if self._receive is not None:
            take_back([self._receive])
            self._receive = None

    def _send(self, message: bytes) -> None:
        self.drained()
        data = np.frombuffer(message, np.uint8)
        self._sends.append((self._comm.Isend(data, self._right, SIGNATURE), data))

    def _post(self) -> None:
        self._receive = self._comm.Irecv(self._incoming, self._left, SIGNATURE)

    def _fail(self, left: Signature, own: Signature) -> NoReturn:
        self.disagreement = left, own
        self._broken = f"ranks disagree: {left}, but {own}; all ranks must make the same calls in the same order"
        if left.agrees(own):  # in words
            self._broken += ", by one algorithm, with arrays all at one place in shared memory, or all elsewhere"
        raise CollectiveMismatch(self._broken)
