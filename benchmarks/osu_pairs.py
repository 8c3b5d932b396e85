"""What the point-to-point benchmarks do in an iteration, what they make of its time, and what they check."""

import statistics
from functools import partial

import numpy as np
import osu
import osu_memory

DATA, ANSWER = 1, 101

window_test = partial(osu.Test, window=64, iterations=(100, 20), warmup=(10, 2))


def memory(bench, size: int) -> tuple[list, list]:
    """What is sent and what is received, as mpi4py takes it: also no byte at all."""
    from mpi4py import MPI

    return tuple([bench.buffers.zeros(name, size), size, MPI.BYTE] for name in ("out", "in"))


def ping_pong(bench, size: int):
    """There and back."""
    (out, into), peer, send, receive = memory(bench, size), bench.peer, bench.comm.Send, bench.comm.Recv

    def first() -> None:
        send(out, peer, DATA)
        receive(into, peer, DATA)

    def second() -> None:
        receive(into, peer, DATA)
        send(out, peer, DATA)

    return first if bench.begins else second


def stream(bench, size: int, both: bool = False):
    """A window of messages, from both ends if asked for, and an answer of 4 bytes when all have come.

    Persistent requests: one call for the window, where each message costs a call of its own from Python else.
    """
    from mpi4py import MPI

    (out, into), peer, comm, window = memory(bench, size), bench.peer, bench.comm, range(bench.window)
    answer, sends, receives = np.zeros(4, np.uint8), both or bench.begins, both or not bench.begins
    requests = [comm.Recv_init(into, peer, DATA) for _ in window] if receives else []
    requests += [comm.Send_init(out, peer, DATA) for _ in window] if sends else []
    bench.on_close += [request.Free for request in requests]

    def once() -> None:
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        if bench.begins:
            comm.Recv(answer, peer, ANSWER)
        else:
            comm.Send(answer, peer, ANSWER)

    return once


exchange = partial(stream, both=True)


def bandwidth(bench, size: int, seconds: list[list[float]], directions: int = 1) -> list[float]:
    """MB/s, of 10^6 bytes, by all pairs together."""
    return [directions * size * messages(bench, seconds) / 1e6]


def bandwidth_and_messages(bench, size: int, seconds: list[list[float]]) -> list[float]:
    return [*bandwidth(bench, size, seconds), messages(bench, seconds)]


def messages(bench, seconds: list[list[float]]) -> float:
    """A second, by all pairs together."""
    return sum(bench.window / statistics.fmean(each) for each in seconds[: bench.half])


def check(prepare, bench, size: int) -> int:
    """Wrong bytes after an iteration in which each rank sends a pattern of its own."""
    once = prepare(bench, size)
    own, expected = (_pattern(size, rank) for rank in (bench.rank, bench.peer))
    (out, *_), (into, *_) = memory(bench, size)
    osu_memory.fill(out, own)
    once()
    arrived = not (prepare is stream and bench.begins)
    return osu_memory.wrong(into, expected) if arrived else 0


def _pattern(size: int, rank: int) -> np.ndarray:
    return np.resize((np.arange(256) * 7 + rank + 1).astype(np.uint8), size)
