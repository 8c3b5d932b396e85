"""The tables of a parameter server: embedding rows that exist from their first touch on.

The same code serves one process, the shard of a server, and each replica of a ring; nothing here depends on where the
ids or gradients come from. Gradients are sums over items; `scale` is 1 / items, multiplied in once, before the
optimizer's step.

Memory of an embedding table: each touched row costs its values, its optimizer state, and 4 bytes (its id). Beside that
there is an index of 4 bytes an owned id (8 from 2^31 owned ids on), of which only pages of 4 KiB are committed that
hold a touched id: at random ids soon all of them, 40 MB for 10 million owned ids.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from hpctrain.model.row_optimizers import RowOptimizer
from hpctrain.model.row_values import OwnedIds, RowMemory, first_values, sum_duplicates
from hpctrain.plan.seeds import derive_seed

DTYPES = {torch.float32: np.float32, torch.float64: np.float64}
MOST_ROWS = 2**40


class EmbeddingTable:
    """`num_rows` rows of `width`; a row is created when it is first read or pushed, normal with deviation `std`.

    Its first values depend on (seed, name, id) only. `ids` are those that this shard owns: a range, or (first, step);
    None: all. `max_rows` limits the rows created. `check_finite`: a push with NaN or infinity is an error.
    """

    def __init__(
        self,
        name: str,
        num_rows: int,
        width: int,
        seed: int,
        std: float,
        optimizer: RowOptimizer,
        dtype: torch.dtype = torch.float32,
        ids: range | tuple[int, int] | None = None,
        max_rows: int | None = None,
        check_finite: bool = True,
    ):
        self.name, self.num_rows, self.width, self.std, self.dtype = name, num_rows, width, std, dtype
        self.optimizer, self.max_rows, self.check_finite = optimizer, max_rows, check_finite
        first, step = (0, 1) if ids is None else (ids.start, ids.step) if isinstance(ids, range) else ids
        self.owned = ids if isinstance(ids, range) else range(first, num_rows, step or 1)
        self._ids = OwnedIds(name, num_rows, self.owned)
        inside = not self.owned or (self.owned[0] >= 0 and self.owned[-1] < num_rows)
        self._require(1 <= num_rows <= MOST_ROWS, f"{num_rows} rows; 1 to 2^40 would do")
        self._require(width >= 1, f"rows of width {width}; 1 or more would do")
        self._require(std >= 0 and math.isfinite(std), f"std {std}; a finite number from 0 on would do")
        self._require(dtype in DTYPES, f"rows of {dtype}; torch.float32 or torch.float64 would do")
        self._require(max_rows is None or max_rows >= 1, f"max_rows {max_rows}; 1 or more would do")
        self._require(step >= 1 and inside, f"a shard of {self.owned} does not lie within rows 0 to {num_rows - 1}")
        self._key = derive_seed(seed, "table", name)
        self._capacity = min(len(self.owned), max_rows or len(self.owned))
        self._memory = self._new_memory()

    def rows(self, ids, create: bool = True, empty: Callable[..., Tensor] = torch.empty) -> Tensor:
        """A copy of these rows, (len(ids), width), in what `empty(rows, width, dtype=)` gives. Duplicates are allowed.

        Rows that do not exist yet are created, or only worked out (`create` False). `ids`: int32 or int64 in one
        dimension, tensor or array. TableError, and no new row, if any cannot be had.
        """
        places = self._ids.places(ids)
        slots = self._slots(places) if create else self._memory.index[places]
        values = empty(len(slots), self.width, dtype=self.dtype)
        self._memory.take("values", slots, values.numpy())
        missing = np.empty(0) if create else slots == 0
        if missing.any():
            values.numpy()[missing] = first_values(self._key, self._ids.ids(places[missing]), self.width, self.std)
        return values

    def touch(self, ids) -> None:
        """Creates these rows where they do not exist yet. TableError, and no new row, if any cannot be had."""
        self._slots(self._ids.places(ids))

    def check(self, ids, gradients: Tensor) -> None:
        """TableError for what `push` would refuse, whatever the table holds and whichever the numbers."""
        self._checked(ids, gradients)

    def refuse_infinite(self, ids, gradients: Tensor) -> None:
        """TableError where a gradient is NaN or infinite."""
        places = self._checked(ids, gradients)
        self._refuse_infinite(places, places, gradients)

    def push(self, ids, gradients: Tensor, *, lr: float, scale: float = 1.0, distinct: bool = False) -> None:
        """One optimizer step of each row in `ids`, with the sum of its `gradients` (len(ids), width), times `scale`.

        Rows are created where they do not exist yet. `distinct`: no id is there twice. After a TableError nothing has
        changed.
        """
        places = self._checked(ids, gradients)
        if not len(places):
            return
        sums = gradients.detach().contiguous()
        unique, sums = (places, sums) if distinct else sum_duplicates(places, sums)
        if scale != 1.0:
            sums = sums * scale
        if self.check_finite and not torch.isfinite(sums.sum()):
            self._refuse_infinite(places, unique, sums)
        slots = self._slots(unique)
        taken = {name: self._memory.borrow(name, slots) for name in self._memory.arrays}
        if "steps" in taken:
            taken["steps"] += 1
        values, *state = (torch.from_numpy(rows) for name, rows in taken.items() if name != "steps")
        self.optimizer.update(values, state, sums, taken.get("steps"), lr)
        for name, rows in taken.items():
            self._memory.put(name, slots, rows)

    def _checked(self, ids, gradients: Tensor) -> np.ndarray:
        """Places of `ids`, with as many gradients of the right kind."""
        places = self._ids.places(ids)
        kind = gradients.dtype if isinstance(gradients, Tensor) else type(gradients).__name__
        self._require(kind == self.dtype, f"gradients of {kind}, its rows are {self.dtype}")
        shape, wanted = tuple(gradients.shape), (len(places), self.width)
        self._require(shape == wanted, f"gradients of shape {shape} for {len(places)} ids, not {wanted}")
        return places

    @property
    def num_touched(self) -> int:
        """Rows that exist."""
        return self._memory.num_rows

    @property
    def nbytes_touched(self) -> int:
        """Bytes of the rows that exist, with their optimizer state and ids; without the index."""
        return self._memory.num_rows * self._memory.row_bytes

    def touched(self) -> Tensor:
        """Ids of the rows that exist, ascending, int64."""
        return torch.from_numpy(self._ids.ids(self._memory.places()))

    def fingerprint_rows(self) -> tuple[Tensor, Tensor]:
        """Ids and values of the rows that exist, by ascending id: the same whatever the order of touching was."""
        ids = self.touched()
        return ids, self.rows(ids)

    def state(self) -> dict[str, Tensor]:
        """A copy of all, by ascending id: `ids`, `values`, the optimizer's slots, `steps` where it counts them."""
        slots = self._memory.index[self._memory.places()]
        arrays = {name: torch.from_numpy(self._memory.take(name, slots)) for name in self._memory.arrays}
        return {"ids": self.touched()} | arrays

    def prepare_state(self, state: Mapping[str, Tensor], fresh: bool = False) -> Callable[[], None]:
        """What makes this the table that `state` was taken of, when it is called, and cannot fail.

        The ids must be those of this shard; their order is free. `fresh`: of `values` alone, the optimizer begins anew.
        TableError for what cannot be a state of this table.
        """
        names = {"ids", *self._memory.arrays}
        if fresh and state.keys() == {"ids", "values"}:
            state = {**self._zeros(len(state["ids"])), **state}
        self._require(state.keys() == names, f"state of {sorted(state)}, not of {sorted(names)}")
        places = self._ids.places(state["ids"])
        self._require(len(np.unique(places)) == len(places), "state with an id more than once")
        self._require(len(places) <= self._capacity, f"state of {len(places)} rows, it holds at most {self._capacity}")
        arrays = {name: state[name].detach().cpu().numpy() for name in self._memory.arrays}
        for name, own in self._memory.arrays.items():
            given, wanted = (arrays[name].dtype, arrays[name].shape), (own.dtype, (len(places), *own.shape[1:]))
            self._require(given == wanted, f"state {name} is {given[0]} {given[1]}, not {wanted[0]} {wanted[1]}")
        memory = self._new_memory()
        memory.add(places, arrays)

        def take() -> None:
            self._memory = memory

        return take

    def _zeros(self, num_rows: int) -> dict[str, Tensor]:
        """What the optimizer keeps of rows that it has not stepped."""
        return {
            name: torch.from_numpy(np.zeros_like(own, shape=(num_rows, *own.shape[1:])))
            for name, own in (self._memory.arrays.items())
            if name != "values"
        }

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise self._ids.error(message)

    def _new_memory(self) -> RowMemory:
        widths = {"values": self.width} | self.optimizer.slots(self.width)
        kinds: dict[str, tuple] = {name: (width, DTYPES[self.dtype]) for name, width in widths.items()}
        if self.optimizer.counts_steps:
            kinds["steps"] = (None, np.int32)
        try:
            return RowMemory(len(self.owned), self._capacity, kinds)
        except (OSError, OverflowError) as error:
            wanted = f"no address space for {self._capacity} rows of {self.width}"
            raise self._ids.error(f"{wanted} ({error}); look at ulimit -v, or give max_rows") from None

    def _slots(self, places: np.ndarray) -> np.ndarray:
        """Where these rows are in memory, created where they do not exist yet."""
        slots = self._memory.index[places]
        if slots.all():
            return slots
        new = places[slots == 0]
        unique, firsts = np.unique(new, return_index=True)
        room = self._capacity - self._memory.num_rows
        if len(unique) > room:
            first, held = self._ids.ids(new[np.sort(firsts)[room]]), self._memory.num_rows
            raise self._ids.error(f"id {first} would be a row too many, it holds {held} of at most {self.max_rows}")
        values = first_values(self._key, self._ids.ids(unique), self.width, self.std)
        self._memory.add(unique, {"values": values})
        return self._memory.index[places]

    def _refuse_infinite(self, places: np.ndarray, unique: np.ndarray, sums: Tensor) -> None:
        bad = unique[~torch.isfinite(sums).all(1).numpy()]  # none where only the sum over all rows overflowed
        if len(bad):
            first = self._ids.ids(places[np.isin(places, bad)][0])
            raise self._ids.error(f"id {first} has a gradient with NaN or infinity")
