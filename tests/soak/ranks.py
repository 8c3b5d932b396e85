"""Random all-reduces, each looked at: `mpirun -n N python ranks.py FOLDER TURNS SEED`; exit code 1 at a wrong element.

Each rank leaves its process number in FOLDER first, for who stops it now and then.
"""

import os
import random
import sys
from pathlib import Path

import numpy as np

from hpctrain import AllReduce, Mesh, abort_on_error
from hpctrain.plan.allreduce import CHOICES

DTYPES = ("float64", "float32", "float16", "complex64", "int64", "int32", "int8", "uint16")
TURNS_OF_A_MESH = 250
WINDOW_BYTES = 1 << 20
SMALLEST, LARGEST = 0, 5.5  # powers of ten of elements


def share(dtype: str, length: int, rank: int, turn: int) -> np.ndarray:
    """Small whole numbers, whose sum is exact in any order."""
    return ((np.arange(length) * (rank + 1) + turn) % 7).astype(dtype)


def draw(rng: random.Random) -> tuple[str, str, int, bool]:
    """An algorithm, a dtype, a length, and whether the array lies in shared memory."""
    dtype, length = rng.choice(DTYPES), int(10 ** rng.uniform(SMALLEST, LARGEST)) - 1
    in_window = length * np.dtype(dtype).itemsize <= WINDOW_BYTES and rng.random() < 0.5
    return rng.choice(CHOICES), dtype, length, in_window


def turn_of(mesh: Mesh, rng: random.Random, turn: int, windows: list[np.ndarray]) -> list[str]:
    """Some calls, begun together and waited for in another order; what is wrong with them."""
    begun, free = [], list(windows)
    for number in range(rng.choice([1, 1, 2, 3, 6])):
        algorithm, dtype, length, in_window = draw(rng)
        own = share(dtype, length, mesh.rank, turn + number)
        array = free.pop()[: own.nbytes].view(dtype) if in_window else own
        array[:] = own
        call = AllReduce(mesh, algorithm=algorithm).start(array, f"turn {turn}.{number}")
        begun.append((call, array, number, f"{algorithm} {dtype} x {length}, in window: {in_window}"))
        if rng.random() < 0.1:
            mesh.barrier()
    for call, *_ in rng.sample(begun, len(begun)):
        call.wait()
    found = []
    for _, array, number, what in begun:
        wanted = sum(share(str(array.dtype), len(array), rank, turn + number) for rank in range(mesh.size))
        if bad := int((array != wanted).sum()):
            found.append(f"turn {turn}.{number}, {what}: {bad} wrong elements on rank {mesh.rank}")
    return found


def main(folder: str, turns: int, seed: int) -> int:
    found: list[str] = []
    for first in range(0, turns, TURNS_OF_A_MESH):
        with Mesh() as mesh:
            if first == 0:
                Path(folder, f"{mesh.rank}.pid").write_text(str(os.getpid()))
            windows = [AllReduce(mesh).empty(WINDOW_BYTES, np.uint8) for _ in range(6)]
            for turn in range(first, min(turns, first + TURNS_OF_A_MESH)):
                found += turn_of(mesh, random.Random(f"{seed} {turn}"), turn, windows)
            del windows
            found = sum(mesh.world.all_gather_json(found), [])
        if mesh.rank == 0:
            print(f"{min(turns, first + TURNS_OF_A_MESH)} turns, {len(found)} faults", flush=True)
        if found:
            if mesh.rank == 0:
                print(*found[:20], sep="\n", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    with abort_on_error():
        code = main(sys.argv[1], *map(int, sys.argv[2:]))
    sys.exit(code)
