"""Which algorithm sums up an array, by facts that all ranks share: so all choose the same."""

ALGORITHMS = ("ring", "windows")
CHOICES = ("auto", *ALGORITHMS)


LARGEST_STAGED = 4 << 20  # bytes: what is larger and lies elsewhere costs more to copy than to send


def choose(algorithm: str, nbytes: int, shares_node: bool, in_window: bool) -> str:
    """The one of ALGORITHMS for an array of `nbytes`.

    `algorithm` is of CHOICES; `shares_node`: all ranks share memory; `in_window`: the array lies in it. ValueError for
    what cannot be done.
    """
    if algorithm not in CHOICES:
        raise ValueError(f"algorithm={algorithm!r}: it is {', '.join(CHOICES)}")
    if algorithm == "windows" and not shares_node:
        raise ValueError("algorithm='windows': the ranks share no memory; use 'auto' or 'ring'")
    if algorithm == "auto":
        return "windows" if shares_node and (in_window or nbytes <= LARGEST_STAGED) else "ring"
    return algorithm
