"""Sums of arrays on a device by all ranks of a launch: bits, and races. Rank 0 prints one line of JSON.

    mpirun -n 2 python tests/gpu/ranks.py NUM_RACES

A race: a kernel that takes some milliseconds, the values behind it on the same stream, and at once a sum. Whoever reads
or writes before the device has come there has the values from before.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "complex64")
LENGTHS = (1, 1000, 300_001)
CYCLES = 4_000_000  # some milliseconds
SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


def share(dtype: str, length: int, rank: int) -> np.ndarray:
    """What a rank brings to a sum; bfloat16 as float32."""
    random = np.random.default_rng((length, rank, DTYPES.index(dtype)))
    numbers = 100 * random.standard_normal(length)
    if dtype == "complex64":
        numbers = numbers + 1j * random.standard_normal(length)
    return numbers.astype("float32" if dtype == "bfloat16" else dtype)


def bits(mesh, device: str) -> tuple[str, list[str]]:
    """A hash of all sums on `device`, and which of them differ from the host's along the ring.

    Of complex numbers only sums: CuPy divides them otherwise than NumPy does, in the last bit.
    """
    import torch

    from hpctrain import AllReduce

    digest, wrong = hashlib.sha256(), []
    for dtype in DTYPES:
        for length in LENGTHS:
            for reduction in ("sum", "mean") if "float" in dtype else ("sum",):
                own = torch.from_numpy(share(dtype, length, mesh.rank)).to(getattr(torch, dtype))
                there = own.to(device, copy=True)
                AllReduce(mesh, reduction)(there)
                AllReduce(mesh, reduction, algorithm="ring")(own)
                found, right = (each.cpu().view(torch.uint8).numpy().tobytes() for each in (there, own))
                digest.update(found)
                if found != right:
                    wrong.append(f"rank {mesh.rank}: {reduction} of {length} {dtype} differs from the host's")
    return digest.hexdigest(), wrong


class Torch:
    """Arrays of torch, its streams, and a kernel that takes its time."""

    def __init__(self, number: int):
        import torch

        self._torch, self._device = torch, torch.device("cuda", number)

    def stream(self, is_default: bool):
        cuda = self._torch.cuda
        return cuda.stream(cuda.default_stream(self._device) if is_default else cuda.Stream(self._device))

    def array(self, length: int):
        return self._torch.full((length,), -1.0, device=self._device)

    def compute(self, array, value: float) -> None:
        self._torch.cuda._sleep(CYCLES)
        array.fill_(value)

    def read(self, array) -> np.ndarray:
        return array.cpu().numpy()


class Cupy:
    """The same of CuPy."""

    def __init__(self, number: int):
        import cupy

        self._cupy = cupy
        cupy.cuda.Device(number).use()
        self._spin = cupy.RawKernel(SPIN, "spin")

    def stream(self, is_default: bool):
        cuda = self._cupy.cuda
        return cuda.Stream.null if is_default else cuda.Stream(non_blocking=True)

    def array(self, length: int):
        return self._cupy.full(length, -1.0, np.float32)

    def compute(self, array, value: float) -> None:
        self._spin((1,), (1,), (np.int64(CYCLES),))
        array.fill(value)

    def read(self, array) -> np.ndarray:
        return array.get()


def races(mesh, libraries, num_races: int) -> list[str]:
    """What was wrong: both libraries, default streams and others, results read by their own stream and by another."""
    from hpctrain import AllReduce

    sum_up, wrong = AllReduce(mesh), []
    for turn in range(num_races):
        library, is_default, length = libraries[turn % 2], turn // 2 % 2 == 0, LENGTHS[turn // 4 % len(LENGTHS)]
        right = sum(rank + turn for rank in range(mesh.size))
        with library.stream(is_default):
            array = library.array(length)
            library.compute(array, float(mesh.rank + turn))
            sum_up(array)
            seen = [library.read(array)]
        with library.stream(False):
            seen.append(library.read(array))
        for which, values in zip(("its own", "another"), seen, strict=True):
            if not (values == right).all():
                where = f"{type(library).__name__}, {'default' if is_default else 'own'} stream, {length} numbers"
                wrong.append(f"rank {mesh.rank}, race {turn} ({where}): {which} stream saw {values[0]}, not {right}")
    return wrong


def main(num_races: int) -> None:
    from hpctrain import Mesh, abort_on_error
    from hpctrain.comm.devices import visible_devices
    from hpctrain.plan.devices import choose

    with abort_on_error():
        import torch

        mesh = Mesh()
        number = choose(len(visible_devices()[0]), mesh.rank)
        torch.cuda.set_device(number)
        digest, wrong = bits(mesh, f"cuda:{number}")
        wrong += races(mesh, [Torch(number), Cupy(number)], num_races)
        ring = mesh.data.ring
        told = mesh.world.all_gather_json([digest, wrong, ring.counters.direct_bytes, ring.counters.staged_bytes])
        if mesh.rank == 0:
            digests, wrongs, direct, staged = zip(*told, strict=True)
            facts = {"sha256": sorted(set(digests)), "wrong": sum(wrongs, []), "races": num_races}
            print(json.dumps({**facts, "direct_bytes": sum(direct), "staged_bytes": sum(staged)}), flush=True)
        mesh.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
