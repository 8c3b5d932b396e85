"""The ring on memory of a device: the bits of the host's ring, in an order of work that holds with any device's timing.

There is no device here: CuPy's stand-in (stand_in.py) runs the same code, and sees who touches memory too early.
"""

import numpy as np
import pytest

from hpctrain.comm.allreduce import AllReduce
from hpctrain.comm.cuda_aware import SWITCH
from hpctrain.comm.device_buffer import see
from hpctrain.comm.doubling import Doubling
from hpctrain.comm.mesh import Mesh
from hpctrain.comm.node_sum import NodeSum
from hpctrain.comm.one_shot import OneShot
from hpctrain.comm.ring import Ring
from hpctrain.comm.signature import CollectiveMismatch
from hpctrain.comm.stream import Device
from tests.comm import device_checks as checks
from tests.comm.arrays import FLOATS, INTEGERS
from tests.comm.stand_in import GuardedComm
from tests.planted.device_bugs import BUGS

pytestmark = pytest.mark.mpi
MOST_RANKS = 4  # tell the rest: chunks and steps are the host's
SAYS = {"direct": "1", "staged": "0"}  # by the switch that a user has


@pytest.fixture(autouse=True)
def few_ranks(peers):
    if peers.size > MOST_RANKS:
        pytest.skip(f"{MOST_RANKS} ranks are enough")


@pytest.fixture(params=SAYS)
def path(request, monkeypatch) -> str:
    monkeypatch.setenv(SWITCH, SAYS[request.param])
    return request.param


def borders(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 40})


@pytest.mark.parametrize("operation", checks.OPERATIONS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bfloat16"])
def test_every_dtype_and_operation_has_the_bits_of_the_host(comm, path, shared_seed, dtype, operation):
    assert checks.equal_to_host(comm, path, dtype, borders(comm.size), operation=operation, seed=shared_seed) == []


@pytest.mark.parametrize("segment_bytes", [32, 200, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_segments_of_any_size_have_the_bits_of_the_host(comm, path, shared_seed, dtype, segment_bytes):
    lengths = [199, 200, 403]
    for operation in checks.OPERATIONS:
        problems = checks.equal_to_host(
            comm, path, dtype, lengths, operation=operation, segment_bytes=segment_bytes, seed=shared_seed
        )
        assert problems == []


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_a_mean_is_divided_once_on_the_device(comm, path, shared_seed, dtype):
    assert checks.equal_to_host(comm, path, dtype, [100], segment_bytes=200, seed=shared_seed, divisor=3.0) == []


@pytest.mark.parametrize("turn", range(8))
def test_random_programs_keep_the_order_of_work(comm, path, shared_seed, turn):
    assert checks.random_program(comm, path, shared_seed + turn) == []


@pytest.mark.parametrize("name, path", [(name, path) for name, bug in BUGS.items() for path in bug.paths])
def test_the_check_sees_the_planted_bug(fresh_comm, peers, monkeypatch, shared_seed, name, path):
    if peers.size == 1:
        pytest.skip("it shows on two ranks and more")
    monkeypatch.setenv(SWITCH, SAYS[path])
    bug = BUGS[name]
    with monkeypatch.context() as planted:
        planted.setattr(bug.target, bug.attribute, bug.planted)
        red = peers.everybody(_problems(fresh_comm(), bug.check, path, shared_seed))
    assert any(red), "no rank saw it"
    assert not any(peers.everybody(_problems(fresh_comm(), bug.check, path, shared_seed)))


def _problems(comm, check, path, seed) -> list[str]:
    return getattr(checks, check)(comm, path, seed)


@pytest.fixture
def mesh(comm, path):
    with Mesh(comm=comm) as mesh:
        yield mesh


def on_device(path, values, dtype=""):
    """The array on a device of its own library."""
    library = checks.library_for(path, 0)
    return checks.OnDevice(library, Device(library, checks.NUMBER), values, dtype or values.dtype.name)


def test_auto_goes_along_the_ring_also_where_ranks_share_memory(mesh, path):
    there = on_device(path, np.full(1000, mesh.data.rank + 1.0))
    mean = AllReduce(mesh, "mean")
    assert mean.prepare(there.buffer).algorithm == "ring"
    with there.computing():
        assert mean(there.buffer) is there.buffer
    there._library.finish()
    assert np.all(there.array.host == (mesh.data.size + 1) / 2) and there._library.problems == []
    with pytest.raises(ValueError, match="the mean of an array of i4 is not an integer"):
        mean(on_device(path, np.ones(3, np.int32)).buffer)


@pytest.mark.parametrize("compress", ["none", "bf16"])
@pytest.mark.parametrize("algorithm", ["doubling", "windows", "ring"])
def test_what_sums_on_the_host_has_its_bits_on_a_device_too(mesh, path, algorithm, compress):
    """Several at once, each begun again; the mean of numbers that the caller computes yet."""
    if algorithm == "windows" and mesh.data.size > 1 and mesh.data.ring.node is None:
        pytest.skip("no shared memory")
    mean = AllReduce(mesh, "mean", algorithm, compress)
    values = [np.random.default_rng((mesh.data.rank, each)).standard_normal(100 + each) for each in range(3)]
    there = [on_device(path, np.zeros_like(each)) for each in values]
    calls = [mean.prepare(each.buffer, f"array {number}") for number, each in enumerate(there)]
    for turn in range(1, 3):
        for each, own, call in zip(there, values, calls, strict=True):
            each.fill(turn * own)
            with each.computing():
                call.start()
        for each, own, call in zip(there, values, calls, strict=True):
            call.wait()
            seen = each._library.array(np.zeros_like(own))
            each.compute(lambda array, seen=seen: seen.__setitem__(slice(None), array))
            each._library.finish()
            assert np.array_equal(seen.host, mean(turn * own)) and each._library.problems == []
    for call in calls:
        call.release()


def test_what_takes_memory_of_the_host_only_refuses_that_of_a_device_by_one_line(mesh, path):
    array = on_device(path, np.ones(3, np.float32)).buffer
    ring = mesh.data.ring
    refusing = {
        "a sum by doubling": lambda: Doubling(ring, array),
        "a sum in one hop": lambda: OneShot(ring, array, "loss"),
        "a broadcast": lambda: mesh.data.broadcast(array),
    }
    if ring.node is not None:
        refusing["a sum in shared memory"] = lambda: NodeSum(ring.node, array)
    for what, call in refusing.items():
        with pytest.raises(ValueError, match="takes memory of the host only") as caught:
            call()
        assert str(caught.value).startswith(what) and "\n" not in str(caught.value)


def test_a_call_started_again_asks_for_no_further_memory(comm, make_ring, path):
    there = on_device(path, np.ones(100, np.float16))
    device = there.buffer.device
    ring = make_ring(wrapper=GuardedComm(comm, there._library), segment_bytes=50)
    call = ring.all_reduce(there.buffer)
    there.run(call)
    allocated = []
    for pool in (device.memory, device.pinned):
        pool._allocate = allocated.append
    for _ in range(3):
        there.compute(lambda array: np.multiply(array, np.float16(1 / comm.size), out=array))
        there.run(call)
    there._library.finish()
    assert allocated == [] and there._library.problems == []
    assert np.all(np.abs(there.array.host - comm.size) < 0.01)


def test_start_waits_for_nothing_that_the_caller_computes(comm, make_ring, path):
    there = on_device(path, np.ones(100))
    there._library.is_stuck = True
    ring = make_ring(wrapper=GuardedComm(comm, there._library))
    there.compute(lambda array: np.add(array, 1.0, out=array))
    with there.computing():
        call = ring.all_reduce(there.buffer).start()
    if comm.size > 1:
        assert not any(call.poll() for _ in range(100))
    there._library.is_stuck = False
    call.wait()
    there._library.finish()
    assert np.all(there.array.host == 2 * comm.size)


def test_memory_of_a_call_under_way_is_refused_to_another(comm, make_ring, path):
    if comm.size == 1:
        pytest.skip("one rank alone has no call under way")
    there, ring = on_device(path, np.ones(100)), make_ring()
    there._library.is_stuck = True
    call = ring.all_reduce(there.buffer, "first").start()
    part = see(there.array[10:20], there.buffer.device)
    with pytest.raises(RuntimeError, match="would change memory of first"):
        ring.all_reduce(part, "second").start()
    ring.all_reduce(np.ones(100)).wait()  # the host's is other memory
    there._library.is_stuck = False
    call.wait()


def test_ranks_that_disagree_get_the_error(fresh_comm, path):
    comm = fresh_comm()
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    there = on_device(path, np.ones(100 + (comm.rank == 1)))
    ring = Ring(GuardedComm(comm, there._library), segment_bytes=64)
    with pytest.raises(CollectiveMismatch):
        ring.all_reduce(there.buffer).run()
    ring.close()
    there._library.finish()
    assert there._library.problems == []


def test_memory_of_the_host_meets_that_of_a_device(comm, make_ring, path):
    values = np.arange(100.0) * (comm.rank + 1)
    there = on_device(path, values)
    ring = make_ring(segment_bytes=100)
    ring.all_reduce(there.buffer if comm.rank == 0 else values).run()
    there._library.finish()
    got = there.array.host if comm.rank == 0 else values
    assert np.array_equal(got, np.arange(100.0) * comm.size * (comm.size + 1) / 2)


def test_one_line_says_that_messages_go_through_the_host_and_how_to_overrule_it(comm, make_ring, path, capsys):
    ring, there = make_ring(), on_device(path, np.ones(10))
    for _ in range(2):
        ring.all_reduce(there.buffer).run()
    said = capsys.readouterr().err
    is_told = path == "staged" and comm.rank == 0 and comm.size > 1
    assert said.count("hpctrain: MPI takes memory of the host only") == is_told and said.count("\n") == is_told
    assert not is_told or f"{SWITCH}=1" in said
