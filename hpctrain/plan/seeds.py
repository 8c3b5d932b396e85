"""Seeds for everything random: a function of what the numbers are for, never of the rank or the layout."""

import hashlib


def derive_seed(*key: int | str) -> int:
    """63 bits from a key such as (seed, "layer", 3): the same key gives the same seed on every rank and machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
