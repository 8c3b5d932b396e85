"""What embedding rows are made of: their first values, their ids, and memory that costs nothing before it is touched.

A first value is a function of (key of the table, id, column) alone, so that any shard, in any order, makes the same
row. The bits come from SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) used as a counter-based generator: each row is
a stream whose start is the hash of its id. Box and Muller (1958) make normal numbers of them. Logarithm, sine and
cosine are polynomials here, to about 1e-15: NumPy's own differ in the last bit between machines, while sums, products,
quotients and square roots are exact to rounding on all of them.
"""

import math
import mmap
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import torch

GOLDEN = 0x9E3779B97F4A7C15
PAIRS_AT_ONCE = 8192  # what is computed at once stays in the cache
LOG_TERMS = [2.0 / (2 * k + 1) for k in range(11)]
SINE_TERMS = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(9)]
COSINE_TERMS = [(-1.0) ** k / math.factorial(2 * k) for k in range(9)]
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class TableError(ValueError):
    """What a table was asked for cannot be done; it is as it was before."""


class OwnedIds:
    """Those of the ids 0 to `num_rows` - 1 that a shard owns: `owned`, ascending; the i-th of them has place i."""

    def __init__(self, table: str, num_rows: int, owned: range):
        self.table, self.num_rows, self.owned = table, num_rows, owned

    def ids(self, places):
        """The ids at these places."""
        return places * self.owned.step + self.owned.start

    def places(self, ids) -> np.ndarray:
        """Of `ids`, int32 or int64 in one dimension, as int64; TableError for the first one that is not owned."""
        ids = ids.detach().cpu().numpy() if isinstance(ids, torch.Tensor) else np.asarray(ids)
        if ids.ndim != 1 or ids.dtype not in (np.int32, np.int64):
            raise self.error(f"ids are {ids.dtype} {ids.shape}; int32 or int64 in one dimension would do")
        ids = ids.astype(np.int64, copy=False)
        if not len(ids):
            return ids
        if ids.min() < 0 or ids.max() >= self.num_rows:
            first = ids[(ids < 0) | (ids >= self.num_rows)][0]
            raise self.error(f"id {first} is out of range, it has rows 0 to {self.num_rows - 1}")
        if len(self.owned) == self.num_rows:
            return ids
        places, beside = np.divmod(ids - self.owned.start, self.owned.step)
        if beside.any() or places.min() < 0 or places.max() >= len(self.owned):
            first = ids[(beside != 0) | (places < 0) | (places >= len(self.owned))][0]
            own = f"{self.owned[0]} to {self.owned[-1]} in steps of {self.owned.step}" if self.owned else "none"
            raise self.error(f"id {first} belongs to another shard, this one has rows {own}")
        return places

    def error(self, message: str) -> TableError:
        return TableError(f"table {self.table}: {message}")


class RowMemory:
    """Up to `capacity` rows of several arrays, `kinds` giving (width or None for a number, dtype) by name.

    Rows lie in the order in which they were added, so that nothing is ever copied. Row 0 of the arrays is nobody's:
    `index` holds 0 for each of `num_places` places that has no row. OSError as virtual_array has it.
    """

    def __init__(self, num_places: int, capacity: int, kinds: Mapping[str, tuple[int | None, type]]):
        number = np.int32 if num_places < 2**31 else np.int64
        self.index = virtual_array((num_places,), number, huge_pages=False)  # a touched id must not commit 2 MiB
        self._places = virtual_array((capacity + 1,), number)
        self.arrays = {
            name: virtual_array((capacity + 1,) if width is None else (capacity + 1, width), dtype)
            for name, (width, dtype) in kinds.items()
        }
        self.num_rows = 0
        self._borrowed: dict[str, np.ndarray] = {}

    @property
    def row_bytes(self) -> int:
        """What a row costs, without the index."""
        return sum(array[:1].nbytes for array in (self._places, *self.arrays.values()))

    def places(self) -> np.ndarray:
        """Of all rows, ascending, int64."""
        return np.sort(self._places[1 : self.num_rows + 1]).astype(np.int64)

    def add(self, places: np.ndarray, arrays: Mapping[str, np.ndarray]) -> None:
        """New rows at these distinct places; arrays that are not given stay zero there."""
        start, stop = self.num_rows + 1, self.num_rows + 1 + len(places)
        for name, array in arrays.items():
            self.arrays[name][start:stop] = array
        self._places[start:stop] = places
        self.index[places] = np.arange(start, stop)
        self.num_rows += len(places)

    def take(self, name: str, slots: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """A copy of these rows, in `out` if given; `slots` being values of the index."""
        return self.arrays[name].take(slots, axis=0, out=out, mode="clip")

    def borrow(self, name: str, slots: np.ndarray) -> np.ndarray:
        """As `take`, in memory that the next `borrow` of this name writes to."""
        array, memory = self.arrays[name], self._borrowed.get(name)
        if memory is None or len(memory) < len(slots):
            memory = self._borrowed[name] = np.empty((len(slots), *array.shape[1:]), array.dtype)
        return self.take(name, slots, memory[: len(slots)])

    def put(self, name: str, slots: np.ndarray, rows: np.ndarray) -> None:
        array = self.arrays[name]
        if array.ndim == 1:
            array[slots] = rows
        else:
            whole = f"V{array[:1].nbytes}"  # a row as one item: NumPy then copies row by row, not number by number
            array.view(whole)[:, 0][slots] = rows.view(whole)[:, 0]


def first_values(key: int, ids: np.ndarray, width: int, std: float) -> np.ndarray:
    """Normal numbers of mean 0 and deviation `std`: (len(ids), width) float64, for `ids` >= 0 in one dimension."""
    pairs = -(-width // 2)
    values = np.empty((len(ids), 2 * pairs))
    rows_at_once = max(1, PAIRS_AT_ONCE // pairs)
    counters = np.arange(1, 2 * pairs + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    for start in range(0, len(ids), rows_at_once):
        block = ids[start : start + rows_at_once].astype(np.uint64)
        streams = _mix((block + np.uint64(1)) * np.uint64(GOLDEN) + np.uint64(key))
        bits = _mix(streams[:, None] + counters) >> np.uint64(11)
        _box_muller(bits[:, 0::2], bits[:, 1::2], std, values[start : start + rows_at_once])
    return values[:, :width]


def virtual_array(shape: tuple[int, ...], dtype, huge_pages: bool = True) -> np.ndarray:
    """Zeros that start at a page and whose pages are committed one by one, when they are first written.

    OSError where the address space is limited: `ulimit -v`, or vm.overcommit_memory=2.
    """
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | NORESERVE)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError:
            pass  # a kernel without huge pages
    return np.frombuffer(memory, dtype, count).reshape(shape)


def sum_duplicates(ids: np.ndarray, gradients: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Each id once with the sum of its gradients, added up in order of occurrence.

    `ids` are int64 and >= 0, `gradients` (len(ids), width) float. Without duplicates both come back as they are, else
    in ascending order of the ids.
    """
    if len(ids) < 2:
        return ids, gradients
    shift = (len(ids) - 1).bit_length()
    assert int(ids.max()).bit_length() + shift <= 63, (int(ids.max()), len(ids))
    keys = np.sort((ids << shift) | np.arange(len(ids)))  # id and position in one number: sorting is stable, and fast
    ordered = keys >> shift
    is_first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    if is_first.all():
        return ids, gradients
    starts = np.flatnonzero(is_first)
    order = torch.from_numpy(keys & ((1 << shift) - 1))
    sums = torch.nn.functional.embedding_bag(order, gradients, torch.from_numpy(starts), mode="sum")
    return ordered[starts], sums


def _mix(bits: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64; in place."""
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


def _box_muller(radius_bits: np.ndarray, angle_bits: np.ndarray, std: float, out: np.ndarray) -> None:
    """From 53 bits each (n, pairs) to `out` (n, 2 * pairs); both numbers of a pair are neighbours there."""
    radius = np.sqrt(-2.0 * _log((radius_bits.astype(np.float64) + 1.0) * 2.0**-53)) * std
    turns = angle_bits.astype(np.float64) * 2.0**-53
    quarter = np.rint(4.0 * turns)
    angle = (turns - 0.25 * quarter) * (2.0 * math.pi)  # within an eighth of a turn
    square = angle * angle
    sine, cosine = angle * _polynomial(SINE_TERMS, square), _polynomial(COSINE_TERMS, square)
    odd = quarter % 2 == 1
    signs = np.where((quarter == 1) | (quarter == 2), -radius, radius), np.where(quarter % 4 >= 2, -radius, radius)
    out[:, 0::2] = np.where(odd, sine, cosine) * signs[0]
    out[:, 1::2] = np.where(odd, cosine, sine) * signs[1]


def _log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of 0 < x <= 1."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < math.sqrt(0.5)
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)  # log(m) = 2 artanh((m - 1) / (m + 1))
    return (exponent - small) * math.log(2.0) + ratio * _polynomial(LOG_TERMS, ratio * ratio)


def _polynomial(terms: list[float], x: np.ndarray) -> np.ndarray:
    """terms[0] + terms[1] x + terms[2] x^2 + ..."""
    total = np.full_like(x, terms[-1])
    for term in terms[-2::-1]:
        total *= x
        total += term
    return total


def add_up(pushes: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (n,), ascending, and sums (n, width) of what several pushed, (ids, sums) each: added in their order."""
    ids, sums = sum_duplicates(np.concatenate([ids.numpy() for ids, _ in pushes]), torch.cat([s for _, s in pushes]))
    order = np.argsort(ids)
    return torch.from_numpy(ids[order]), sums[torch.from_numpy(order)]
