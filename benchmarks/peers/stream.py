"""An all-reduce beside plain TCP: what a network lets through, and how near to that it comes.

    mpirun -n 4 -hosts node1,node2,node3,node4 python benchmarks/peers/stream.py

One rank or more on each of n hosts, consecutive ones on each. A stream is a socket of each rank to its counterpart on
the next host, all at once, through which goes what each host must send, 2(n-1)/n of the array, shared out among its
ranks. The all-reduce adds up besides. Both take turns in one run; a figure is the median over the pairs of what the
rank that took longest needed.
"""

import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import above  # noqa: F401
import figures
import numpy as np

from hpctrain import AllReduce, Mesh

GOAL = 1.2  # so many times as long as the streams the all-reduce may take
PIECE = 1 << 20  # bytes that a rank hands to its socket at once
HEADER = f"{'pair':<6}{'all-reduce':>12}{'stream':>12}{'all-reduce / stream':>22}"


class Stream:
    """Sockets to the counterpart on the next host and from that on the last one. Collective."""

    def __init__(self, mesh: Mesh, listener: socket.socket):
        addresses = mesh.world.all_gather_json((os.uname().nodename, listener.getsockname()[1]))
        self.per_host = per_host([host for host, _ in addresses])
        self.num_hosts = mesh.size // self.per_host
        self.right = socket.create_connection(addresses[(mesh.rank + self.per_host) % mesh.size])
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


def per_host(names: list[str]) -> int:
    """Ranks on each host; where all are on one, each counts as a host."""
    return names.count(names[0]) if len(set(names)) > 1 else 1


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
    sums, plain = (f"{1e3 * pair[name]:.1f} ms" for name in ("all-reduce", "stream"))
    return f"{number:<6}{sums:>12}{plain:>12}{pair['all-reduce'] / pair['stream']:>22.3f}"


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


def measure(flags, mesh: Mesh, once: Callable, array: np.ndarray, tell) -> list[dict]:
    """Seconds of each side, pair by pair. Collective."""
    pairs = []
    with stream(mesh) as plain:
        least = 2 * (plain.num_hosts - 1) * flags.bytes // plain.num_hosts // plain.per_host
        plain.move(least)
        sides = {"all-reduce": (once, array), "stream": (plain.move, least)}
        for number in range(flags.pairs):
            order = list(sides) if number % 2 == 0 else list(reversed(sides))
            pairs.append({name: seconds_of(*sides[name], mesh) for name in order})
            tell(line(number + 1, pairs[-1]), flush=True)
    return pairs


def summary(pairs: list[dict]) -> tuple[str, float]:
    """A line, and the median of how many times as long the all-reduce took."""
    ratios = [pair["all-reduce"] / pair["stream"] for pair in pairs]
    median = statistics.median(ratios)
    return f"all-reduce / stream: {median:.3f}, with {figures.told(ratios, 3)}", median


def faults(median: float, checks: bool) -> list[str]:
    late = checks and median > GOAL
    return [f"the all-reduce takes {median:.2f} times as long as the streams, not {GOAL}"] if late else []


def run(flags, comm, tell) -> tuple[dict, list[str]]:
    """All figures, and what is wrong with them. Collective."""
    figures.check_memory("--bytes", 4 * flags.bytes, comm)  # with what it takes to look at sums
    with Mesh(comm) as mesh:
        hosts = mesh.world.all_gather_json(os.uname().nodename)
        reduce = AllReduce(mesh, algorithm="auto" if len(set(hosts)) > 1 else "ring")
        array = reduce.empty(flags.bytes // 4)
        algorithm = reduce.prepare(array).algorithm
        if bad := wrong(mesh, array, reduce):
            return {"pairs": []}, [f"{algorithm}: {bad} wrong elements"]
        tell(f"{mesh.size} ranks; {algorithm}; {flags.bytes} bytes, float32, in place", HEADER, sep="\n", flush=True)
        pairs = measure(flags, mesh, reduce, array, tell)
    told, median = summary(pairs)
    tell(told)
    return {"pairs": pairs}, faults(median, flags.check)


if __name__ == "__main__":
    sys.exit(figures.main("stream.py", parse, run, sys.argv[1:], needs=()))
