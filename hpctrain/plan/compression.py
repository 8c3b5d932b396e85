"""How sums of gradients are compressed, as users write it."""

from fractions import Fraction
from typing import NamedTuple

WIRE = ("none", "bf16")  # of messages: any sum may travel so
EXPECTED = "none, bf16, topk:FRACTION or powersgd:RANK, such as topk:0.01"


class Compression(NamedTuple):
    """`kind`: of WIRE, topk or powersgd; `value`: the share of the numbers, or the rank of the factors."""

    kind: str
    value: Fraction = Fraction(0)

    @property
    def keeps_rest(self) -> bool:
        """Whether what is not sent in one step is sent in later ones."""
        return self.kind not in WIRE


def goes_by(kind: str, algorithm: str) -> bool:
    """Whether sums that are compressed so can go by `algorithm`; a `kind` that has no name here is somebody's own.

    What topk sends is gathered, along the ring; factors are summed in memory that lies in no window.
    """
    return kind in WIRE or algorithm in (("auto", "ring") if kind == "topk" else ("auto", "ring", "doubling"))


def is_summed_in_place(algorithm: str, kind: object) -> bool:
    """Whether sums of what is compressed so may be made where it lies, in memory that the ranks of a node share."""
    return algorithm in ("auto", "windows") and kind in WIRE


def parse_compression(text: str) -> Compression:
    """Of none, bf16, topk:0.01 or powersgd:4. ValueError, which says what is expected, for anything else."""
    kind, colon, given = text.partition(":")
    if kind in WIRE and not colon:
        return Compression(kind)
    try:
        value = Fraction(given)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if kind == "topk" and 0 < value <= 1 or kind == "powersgd" and value >= 1 and value.denominator == 1:
        return Compression(kind, value)
    raise ValueError(f"expected {EXPECTED}")
