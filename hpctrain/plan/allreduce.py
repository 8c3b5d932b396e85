"""Which algorithm sums up an array, by facts that all ranks share: so all choose the same."""

from dataclasses import dataclass

ALGORITHMS = ("ring", "doubling", "windows")
CHOICES = ("auto", *ALGORITHMS)
LARGEST_MESSAGE = 1 << 30  # bytes


@dataclass(frozen=True)
class Constants:
    """What the choice depends on besides place and size: built in, or as `tune` has measured it on a machine."""

    latency: float = 50e-6  # seconds that a message takes, however short: over TCP, or to a rank that has to be woken
    seconds_per_byte: float = 1e-9  # of a link of 10 Gbit/s; a faster one has a shorter latency too
    largest_doubled: int = 256 << 10  # bytes: what is larger the ring cuts, and adds one part while the next travels
    largest_staged: int = 4 << 20  # bytes: what is larger and lies elsewhere costs more to copy than to send

    def seconds_of_ring(self, nbytes: int, num_ranks: int) -> float:
        """Of an all-reduce of `nbytes` by messages to the neighbour."""
        return 2 * (num_ranks - 1) * (self.latency + nbytes / num_ranks * self.seconds_per_byte)

    def seconds_of_doubling(self, nbytes: int, num_ranks: int) -> float:
        """Of the same, by recursive doubling."""
        return num_exchanges(num_ranks) * (self.latency + nbytes * self.seconds_per_byte)


BUILT_IN = Constants()


def choose(
    algorithm: str,
    nbytes: int,
    num_ranks: int,
    takes: bool,
    in_window: bool,
    spans_nodes: bool = False,
    constants: Constants = BUILT_IN,
    wire_share: float = 1.0,
) -> str:
    """The one of ALGORITHMS for an array of `nbytes` on `num_ranks`, of which messages carry `wire_share`.

    `algorithm` is of CHOICES; `takes`: ranks share memory with others, and have room there for this array; `in_window`:
    it lies there already; `spans_nodes`: not all are on one node. On one node `auto` gives the same bits whatever room
    there is, and whatever the `constants`. ValueError for what cannot be done.
    """
    if algorithm not in CHOICES:
        raise ValueError(f"algorithm={algorithm!r}: it is {', '.join(CHOICES)}")
    if algorithm == "windows" and not takes:
        raise ValueError(
            "algorithm='windows': the ranks share no memory, or unequally many are on a node, or it has no room; "
            "use 'auto' or 'ring'"
        )
    if algorithm == "doubling" and nbytes > LARGEST_MESSAGE:
        raise ValueError(f"algorithm='doubling': {nbytes} bytes in one message are too many; use 'auto' or 'ring'")
    if algorithm != "auto":
        return algorithm
    if takes and (in_window or nbytes <= constants.largest_staged):
        return "windows"
    return by_messages(round(wire_share * nbytes), num_ranks, constants) if spans_nodes else "ring"


def by_messages(nbytes: int, num_ranks: int, constants: Constants = BUILT_IN) -> str:
    """ "doubling" or "ring", whichever takes less time: the one sends seldom, the other little."""
    ring, doubling = constants.seconds_of_ring(nbytes, num_ranks), constants.seconds_of_doubling(nbytes, num_ranks)
    return "doubling" if nbytes <= constants.largest_doubled and doubling <= ring else "ring"


def num_exchanges(num_ranks: int) -> int:
    """Messages that follow each other in recursive doubling."""
    power = num_ranks.bit_length() - 1
    return power + 2 * (num_ranks > 1 << power)


def nodes_of(names: list[int]) -> list[list[int]]:
    """The ranks of each node, in the order of their first ones; `names` of the nodes they are on, by rank."""
    nodes: dict[int, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())
