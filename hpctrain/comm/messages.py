"""What workers and servers write to each other: fixed binary headers, then numbers straight from memory.

    worker -> server   header | ids (where rows are meant) | values (of a push)
    server -> worker   header | values (of an answer), or text (of a refusal a line, of what was KEPT JSON)

An iteration is a PUSH for each table and one for the dense part, then FINISH. A header is HEADER_BYTES long; what
follows it is cut as the Outbox has it. A worker's headers arrive in order, and the server takes the next only when all
of the one before is there. Payloads of an answer carry the number of their request in the tag, so each lands where it
belongs. After KEEP, of worker 0, JSON follows among the IDS: what to save, or to take over.
"""

import struct
from typing import NamedTuple

import numpy as np

from hpctrain.comm.tags import SERVICE

_HEADER = struct.Struct("<7q3d16x")
HEADER_BYTES = _HEADER.size
PULL, PUSH, FINISH, DONE, KEEP = 1, 2, 3, 4, 7  # of workers; a server answers DONE by itself
VALUES, REFUSED, TOLD = 5, 6, 8  # of servers
DENSE = -1  # in place of the number of a table

TO_SERVER, IDS, PUSHED, TO_WORKER, TEXT, NOTES, START = (SERVICE[number] for number in range(7))
ANSWERS = SERVICE[7:]

SUSPECT = 1  # of FINISH: something of the iteration may not be finite
AHEAD = 2  # of a pull: it may be answered late, so the values are copied
LOOKS = 4  # of a pull: rows that are not there are not created
ASKED = 16  # of an answer: a signal has asked this server to leave
PARTLY = 8  # of a push: one byte for each segment says whether it was touched


class Header(NamedTuple):
    """`clock`: of who asks or pushes. `count`: rows, or elements of the dense part. `bound`: of this pull, in place of
    the server's own, -1 for none.

    `version`, of FINISH: how many updates its weights held, -1 for those of the last pull; of an answer: how many its
    values hold. `items` and `loss`: sums of an iteration, and of an answer those of the round whose gradient it is;
    `lr` of FINISH. An answer has the number of its `request`.
    """

    kind: int
    table: int = DENSE
    request: int = 0
    clock: int = 0
    count: int = 0
    bound: int = -1
    version: int = -1
    items: float = 0.0
    loss: float = 0.0
    lr: float = 0.0
    flags: int = 0

    def pack(self) -> np.ndarray:
        """HEADER_BYTES of uint8."""
        kind = self.kind | self.flags << 8
        rest = self[1:-1]
        return np.frombuffer(_HEADER.pack(kind, *rest), np.uint8)

    @classmethod
    def unpack(cls, data: np.ndarray) -> "Header":
        kind, *rest = _HEADER.unpack(data.tobytes())
        return cls(kind & 0xFF, *rest, flags=kind >> 8)


def answer_tag(request: int) -> int:
    """Of the payload that answers this request."""
    return ANSWERS[request % len(ANSWERS)]
