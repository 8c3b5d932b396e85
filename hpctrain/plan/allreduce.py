"""Which algorithm sums up an array, by facts that all ranks share: so all choose the same."""

ALGORITHMS = ("ring", "doubling", "windows")
CHOICES = ("auto", *ALGORITHMS)
LARGEST_STAGED = 4 << 20  # bytes: what is larger and lies elsewhere costs more to copy than to send
LARGEST_DOUBLED = 256 << 10  # bytes: what is larger the ring cuts, and adds one part while the next travels
LARGEST_MESSAGE = 1 << 30  # bytes
LATENCY = 50e-6  # seconds that a message takes, however short: over TCP, or to a rank that has to be woken
SECONDS_PER_BYTE = 1e-9  # of a link of 10 Gbit/s; a faster one has a shorter latency too


def choose(algorithm: str, nbytes: int, num_ranks: int, takes: bool, in_window: bool, spans_nodes: bool = False) -> str:
    """The one of ALGORITHMS for an array of `nbytes` on `num_ranks`.

    `algorithm` is of CHOICES; `takes`: ranks share memory with others, and have room there for this array; `in_window`:
    it lies there already; `spans_nodes`: not all are on one node. On one node `auto` gives the same bits whatever room
    there is. ValueError for what cannot be done.
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
    if takes and (in_window or nbytes <= LARGEST_STAGED):
        return "windows"
    return by_messages(nbytes, num_ranks) if spans_nodes else "ring"


def by_messages(nbytes: int, num_ranks: int) -> str:
    """ "doubling" or "ring", whichever takes less time: the one sends seldom, the other little."""
    ring = 2 * (num_ranks - 1) * (LATENCY + nbytes / num_ranks * SECONDS_PER_BYTE)
    power = num_ranks.bit_length() - 1
    num_steps = power + 2 * (num_ranks > 1 << power)
    doubling = num_steps * (LATENCY + nbytes * SECONDS_PER_BYTE)
    return "doubling" if nbytes <= LARGEST_DOUBLED and doubling <= ring else "ring"


def nodes_of(names: list[int]) -> list[list[int]]:
    """The ranks of each node, in the order of their first ones; `names` of the nodes they are on, by rank."""
    nodes: dict[int, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name, []).append(rank)
    return list(nodes.values())
