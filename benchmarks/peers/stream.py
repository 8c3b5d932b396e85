"""The ring beside plain TCP: what a network lets through, and how near to that an all-reduce comes.

    mpirun -n 4 -hosts node1,node2,node3,node4 python benchmarks/peers/stream.py

One rank on each host. A stream is a socket of each rank to its right neighbour, all at once, through which goes what a
ring must send: 2(n-1)/n of the array. The ring adds up besides. Both take turns in one run; a figure is the median over
the pairs of what the rank that took longest needed.
"""

import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hpctrain import AllReduce, Mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # of what all benchmarks share
import figures  # noqa: E402

GOAL = 1.2  # so many times as long as the streams the ring may take
PIECE = 1 << 20  # bytes that a rank hands to its socket at once
HEADER = f"{'pair':<6}{'ring':>12}{'stream':>12}{'ring / stream':>16}"


class Stream:
    """Sockets to the right neighbour and from the left one. Collective."""

    def __init__(self, mesh: Mesh, listener: socket.socket):
        addresses = mesh.world.all_gather_json((os.uname().nodename, listener.getsockname()[1]))
        self.right = socket.create_connection(addresses[(mesh.rank + 1) % mesh.size])
        self.left, _ = listener.accept()
        self.piece = bytearray(PIECE)

    def move(self, nbytes: int) -> None:
        """Sends and receives so many bytes; returns when both are done."""
        sender = threading.Thread(target=self._send, args=(nbytes,))
        sender.start()
        with memoryview(self.piece) as into:
            while nbytes:
                nbytes -= self.left.recv_into(into[: min(nbytes, PIECE)])
        sender.join()

    def _send(self, nbytes: int) -> None:
        piece = bytes(PIECE)
        for start in range(0, nbytes, PIECE):
            self.right.sendall(piece[: nbytes - start])


@contextmanager
def stream(mesh: Mesh) -> Iterator[Stream]:
    """Collective."""
    with socket.create_server(("", 0)) as listener:
        found = Stream(mesh, listener)
        with found.left, found.right:
            yield found
            mesh.barrier()


def wrong(mesh: Mesh, array: np.ndarray, call: Callable) -> int:
    """Elements that are not the sum, on any rank. Collective."""
    pattern = np.arange(len(array), dtype=array.dtype) % 251
    array[:] = pattern * (mesh.rank + 1)
    call(array)
    bad = int((array != pattern * (mesh.size * (mesh.size + 1) // 2)).sum())
    array[:] = 0
    return sum(mesh.world.all_gather_json(bad))


def seconds_of(call: Callable, argument, mesh: Mesh) -> float:
    """Of a call, on the rank that took longest. Collective."""
    mesh.barrier()
    began = time.perf_counter()
    call(argument)
    return max(mesh.world.all_gather_json(time.perf_counter() - began))


def line(number: int, pair: dict) -> str:
    ring, plain = (f"{1e3 * pair[name]:.1f} ms" for name in ("ring", "stream"))
    return f"{number:<6}{ring:>12}{plain:>12}{pair['ring'] / pair['stream']:>16.3f}"


def parse(argv: list[str], num_ranks: int, rank: int = 0):
    """ValueError, one line that names the flag, for what does not fit."""
    parser = figures.Flags("stream.py", __doc__.splitlines()[0], rank)
    parser.add_argument("--bytes", type=int, default=64 << 20, metavar="B", help="of the array; default: 64 MiB")
    parser.add_argument("--pairs", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a figure is not what it should be")
    flags = parser.parse_args(argv)
    if num_ranks < 2:
        raise ValueError("one rank has no neighbour; start it by mpirun -n 2")
    if flags.pairs < 1:
        raise ValueError(f"--pairs {flags.pairs}: expected a whole number >= 1")
    if flags.bytes < 4 or flags.bytes % 4:
        raise ValueError(f"--bytes {flags.bytes}: expected a multiple of 4")
    return flags


def measure(flags, mesh: Mesh, ring: Callable, array: np.ndarray, tell) -> list[dict]:
    """Seconds of each side, pair by pair. Collective."""
    least, pairs = 2 * (mesh.size - 1) * flags.bytes // mesh.size, []
    with stream(mesh) as plain:
        plain.move(least)
        sides = {"ring": (ring, array), "stream": (plain.move, least)}
        for number in range(flags.pairs):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            pairs.append({name: seconds_of(*sides[name], mesh) for name in order})
            tell(line(number + 1, pairs[-1]), flush=True)
    return pairs


def summary(pairs: list[dict]) -> tuple[str, float]:
    """A line, and the median of how many times as long the ring took."""
    ratios = [pair["ring"] / pair["stream"] for pair in pairs]
    median, (low, high, inside) = statistics.median(ratios), figures.interval(ratios)
    return f"ring / stream: {median:.3f}, with {inside:.0%} from {low:.3f} to {high:.3f}", median


def faults(median: float, checks: bool) -> list[str]:
    late = checks and median > GOAL
    return [f"the ring takes {median:.2f} times as long as the streams, not {GOAL}"] if late else []


def run(flags, comm, tell) -> tuple[dict, list[str]]:
    """All figures, and what is wrong with them. Collective."""
    with Mesh(comm) as mesh:
        array, ring = np.zeros(flags.bytes // 4, "float32"), AllReduce(mesh)
        if bad := wrong(mesh, array, ring):
            return {"pairs": []}, [f"the ring: {bad} wrong elements"]
        tell(f"{mesh.size} ranks; {flags.bytes} bytes, float32, in place", HEADER, sep="\n", flush=True)
        pairs = measure(flags, mesh, ring, array, tell)
    told, median = summary(pairs)
    tell(told)
    return {"pairs": pairs}, faults(median, flags.check)


if __name__ == "__main__":
    sys.exit(figures.main("stream.py", parse, run, sys.argv[1:]))
