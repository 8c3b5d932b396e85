"""What stands in for CuPy and its device where there is none: the same code runs, and its order of work is checked.

Work is done as late as it may be: what is told a stream happens when an event behind it was seen to have passed, which
takes some looks. Two things that touch the same memory must be in an order: both on one stream, or the first seen to be
done before the second was told. The same holds between streams and MPI, which `GuardedComm` tells what it holds. Where
that is broken, `problems` says so, whatever the bits turn out to be.

Memory of the device is no memory of the host for NumPy or MPI, unless `is_for_mpi`: then an array has an interface that
points at it, as that of a CUDA array does for an MPI which knows of devices.
"""

import random
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.lib.mixins import NDArrayOperatorsMixin

RUBBISH = 0xEE


class Span(NamedTuple):
    """Memory that is read, or written to."""

    begin: int
    end: int
    is_written: bool

    def disturbs(self, other: "Span") -> bool:
        return (self.is_written or other.is_written) and self.begin < other.end and other.begin < self.end


def span(host: np.ndarray, is_written: bool) -> Span:
    begin = host.__array_interface__["data"][0]
    return Span(begin, begin + host.nbytes, is_written)


class Stream:
    """Does what it is told in that order, later."""

    def __init__(self, library: "StandIn", non_blocking: bool = True):
        self._library, self.number = library, library.number
        self.pending: deque = deque()  # (what to do, spans)
        self.num_told = self.num_done = 0
        library.streams.append(self)

    def __enter__(self):
        if self._library.number != self.number:
            self._library.problem("a stream is used on another device")
        self._library.current[self.number].append(self)
        return self

    def __exit__(self, *_):
        self._library.current[self.number].pop()

    def tell(self, what, spans: list[Span]) -> None:
        others = [
            s for stream in self._library.streams if stream is not self for _, each in stream.pending for s in each
        ]
        for other in others:
            if any(own.disturbs(other) for own in spans):
                self._library.problem("work on one stream overtakes work on another")
        for held in self._library.held:
            if any(own.disturbs(held) for own in spans):
                self._library.problem("work on memory that MPI holds")
        self.pending.append((what, spans))
        self.num_told += 1

    def run_to(self, position: int) -> None:
        while self.num_done < position:
            what, _ = self.pending.popleft()
            with np.errstate(all="ignore"):
                what()
            self.num_done += 1


class Event:
    """Passed when it has been looked at often enough."""

    def __init__(self, library: "StandIn", disable_timing: bool = False):
        self._library, self._number = library, library.number

    def record(self, stream: Stream) -> None:
        if stream.number != self._number:
            self._library.problem("an event of one device is recorded on another")
        self._stream, self._position = stream, stream.num_told

    @property
    def done(self) -> bool:
        may_pass = not self._library.is_stuck and self._library.random.randrange(self._library.looks) == 0
        if self._stream.num_done < self._position and may_pass:
            self._stream.run_to(self._position)
        return self._stream.num_done >= self._position

    def synchronize(self) -> None:
        self._stream.run_to(self._position)


class Device:
    """While it is entered, streams and events are made there."""

    def __init__(self, library: "StandIn", number: int):
        self._library, self.number = library, number

    def __enter__(self):
        self._before, self._library.number = self._library.number, self.number
        return self

    def __exit__(self, *_):
        self._library.number = self._before


class DeviceArray(NDArrayOperatorsMixin):
    """One dimension or more of the device's memory, `host` to those who may look behind the curtain."""

    def __init__(self, library: "StandIn", host: np.ndarray):
        self._library, self.host = library, host

    shape, dtype, size, nbytes, itemsize, flags = (
        property(lambda self, name=name: getattr(self.host, name))
        for name in ("shape", "dtype", "size", "nbytes", "itemsize", "flags")
    )

    def __len__(self):
        return len(self.host)

    def __array__(self, *_, **__):
        raise TypeError("memory of the device is not read by the host")

    @property
    def __cuda_array_interface__(self):
        if not self._library.is_for_mpi:
            raise AttributeError("this MPI would end by a segmentation fault")
        interface = {**self.host.__array_interface__, "version": 3, "stream": 1}
        return interface if self.size else {**interface, "data": (0, False)}  # as CuPy says it

    def reshape(self, *shape):
        return DeviceArray(self._library, self.host.reshape(*shape))

    def view(self, dtype):
        return DeviceArray(self._library, self.host.view(dtype))

    def __getitem__(self, key: slice):
        return DeviceArray(self._library, self.host[key])

    def __setitem__(self, key, value) -> None:
        self._library.tell(lambda: self.host.__setitem__(_host(key), _host(value)), [value, key], [self[_all(key)]])

    def get(self, *, stream: Stream, out: np.ndarray, blocking: bool) -> None:
        assert not blocking and out.shape == self.shape and out.dtype == self.dtype
        stream.tell(lambda: np.copyto(out, self.host), [span(self.host, False), span(out, True)])

    def set(self, array: np.ndarray, *, stream: Stream) -> None:
        assert array.shape == self.shape and array.dtype == self.dtype
        stream.tell(lambda: np.copyto(self.host, array), [span(array, False), span(self.host, True)])

    def __array_ufunc__(self, ufunc, method, *inputs, out=None):
        if method != "__call__" or any(isinstance(each, np.ndarray) and each.ndim for each in inputs):
            raise TypeError("memory of the device and of the host do not mix")
        if out is None:
            sample = ufunc(*(_host(each)[:0] if isinstance(each, DeviceArray) else each for each in inputs))
            out = (DeviceArray(self._library, np.empty(self.shape, sample.dtype)),)
        self._library.tell(lambda: ufunc(*map(_host, inputs), out=out[0].host), inputs, out)
        return out[0]

    def __array_function__(self, function, types, arguments, options):
        assert function is np.may_share_memory and all(each is DeviceArray for each in types)
        return function(*map(_host, arguments), **options)


def _host(value):
    return value.host if isinstance(value, DeviceArray) else value


def _all(key):
    return slice(None) if isinstance(key, DeviceArray) else key


class StandIn:
    """The library. `looks`: how often one looks at an event until it has passed, on the average."""

    uint8 = np.uint8

    def __init__(self, seed: int = 0, looks: int = 3, is_for_mpi: bool = False):
        self.random, self.looks, self.is_for_mpi = random.Random(seed), looks, is_for_mpi
        self.is_stuck = False  # no event passes
        self.problems: list[str] = []
        self.streams: list[Stream] = []
        self.held: list[Span] = []  # by MPI
        self.number = 0  # of the current device
        self.current = defaultdict(lambda: [Stream(self)])  # by device, the stack of streams
        self.cuda = SimpleNamespace(
            Device=lambda number: Device(self, number),
            Stream=lambda **options: Stream(self, **options),
            ExternalStream=lambda number: self.streams[number],
            Event=lambda **options: Event(self, **options),
            get_current_stream=lambda: self.current[self.number][-1],
            Memory=lambda nbytes: np.full(nbytes, RUBBISH, np.uint8),
            MemoryPointer=lambda memory, offset: memory[offset:],
            alloc_pinned_memory=lambda nbytes: bytearray([RUBBISH]) * nbytes,
        )

    def ndarray(self, shape, dtype, memory: np.ndarray) -> DeviceArray:
        return DeviceArray(self, memory.view(dtype).reshape(shape))

    def array(self, host: np.ndarray) -> DeviceArray:
        """A copy on the device."""
        return DeviceArray(self, host.copy())

    def tell(self, what, read, written) -> None:
        spans = [span(each.host, False) for each in read if isinstance(each, DeviceArray)]
        self.current[self.number][-1].tell(what, spans + [span(each.host, True) for each in written])

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def hold(self, message, is_written: bool) -> Span:
        """MPI gets a message, to write to or to read."""
        if isinstance(message, DeviceArray) and not self.is_for_mpi:
            self.problem("MPI was given memory of the device")
        held = span(_host(message), is_written)
        if any(held.disturbs(each) for stream in self.streams for _, spans in stream.pending for each in spans):
            self.problem("MPI was given memory that is still worked on")
        if any(held.disturbs(each) for each in self.held):
            self.problem("MPI was given memory that it holds")
        self.held.append(held)
        return held

    def finish(self) -> None:
        """All work is done."""
        for stream in self.streams:
            stream.run_to(stream.num_told)


class GuardedComm(MPI.Intracomm):
    """Used instead of `comm`; what MPI holds is told the library, and a request is seen complete after some looks."""

    def __new__(cls, comm, *_):
        return super().__new__(cls, comm)

    def __init__(self, comm, library: StandIn):
        self._library = library
        self.num_of_device = 0  # messages from or to memory of the device

    def Isend(self, buf, dest, tag=0):  # noqa: N802 - mpi4py's name
        held, taken = self._hold(buf, False)
        return GuardedRequest(self._library, held, super().Isend(taken, dest, tag))

    def Irecv(self, buf, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG):  # noqa: N802 - mpi4py's name
        held, taken = self._hold(buf, True)
        return GuardedRequest(self._library, held, super().Irecv(taken, source, tag))

    def _hold(self, buf, is_written: bool) -> tuple[Span, object]:
        """Also what MPI gets: where it may not have it, something that does not end the test."""
        self.num_of_device += isinstance(buf, DeviceArray)
        return self._library.hold(buf, is_written), buf if self._library.is_for_mpi else _host(buf)


class GuardedRequest:
    """Test and Cancel, as of a request."""

    def __init__(self, library: StandIn, held: Span, request):
        self._library, self._held, self._request = library, held, request
        self._is_complete, self._looks = False, library.random.randint(0, library.looks)

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        self._is_complete = self._is_complete or self._request.Test()
        if not self._is_complete or self._looks > 0:
            self._looks -= self._is_complete
            return False
        if self._held is not None:
            self._library.held.remove(self._held)
            self._held = None
        return True

    def Cancel(self) -> None:  # noqa: N802 - mpi4py's name
        self._looks = 0
        if not self._is_complete:
            self._request.Cancel()
