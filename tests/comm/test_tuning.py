"""Constants from a file: read by one rank, held by the mesh; on one node they change no bit, between nodes the way."""

import json

import numpy as np
import pytest

from hpctrain import AllReduce, Mesh
from hpctrain.comm import nodes
from hpctrain.comm.allreduce import all_reduce
from hpctrain.comm.tuning import MOST_BYTES, place_of, read_tuning
from hpctrain.plan.allreduce import BUILT_IN, Constants
from hpctrain.plan.tuning import Tuning
from tests.plan.test_tuning import EXTREMES, WHOLE

DOUBLES, RINGS = Constants(60, 1e-15, 1 << 30, 0), Constants(1e-9, 1e-3, 0, 0)


@pytest.fixture
def write(shared_tmp_path, peers):
    """Writes a tuning with these changes on rank 0; gives its path there, and one of nothing on the others."""

    def written(**changes):
        path = shared_tmp_path / "tuning.json"
        if peers.rank == 0:
            path.write_text(json.dumps({**WHOLE, **changes}))
        return path if peers.rank == 0 else "/nowhere/tuning.json"

    return written


@pytest.mark.mpi
def test_rank_0_reads_and_all_have_it(comm, write):
    with Mesh(comm, tuning=write()) as mesh:
        wanted = Constants(2.5e-5, 1.25e-10, 65536, 1048576)
        assert mesh.tuning.constants == wanted and mesh.tuning.bucket_bytes == 4194304
        assert mesh.data.ring.constants == mesh.add_group().ring.constants == wanted
    with Mesh(comm) as mesh:
        assert mesh.data.ring.constants == BUILT_IN


@pytest.mark.mpi
def test_a_file_that_cannot_be_used_is_refused_on_all_ranks(comm, write, peers):
    with pytest.raises(ValueError, match=r"^tuning .*tuning.json: latency is -1; expected seconds from 1e-09 to 60; m"):
        Mesh(comm, tuning=write(latency=-1))
    with pytest.raises(ValueError, match="^tuning nowhere.json: No such file or directory; measure again: mpirun -n N"):
        Mesh(comm, tuning="nowhere.json")
    with Mesh(comm) as mesh:
        mesh.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("giver", ["the first", "the last", "all but the first"])
@pytest.mark.parametrize("kind", ["file", "values"])
def test_a_tuning_on_some_ranks_only_is_told_to_all(comm, write, giver, kind):
    path = write()
    gives = {"the first": comm.rank == 0, "the last": comm.rank == comm.size - 1, "all but the first": comm.rank > 0}
    tuning = path if kind == "file" else Tuning()
    number = comm.size - 1 if giver == "all but the first" else 1
    with pytest.raises(ValueError, match=f"^tuning: {number} of {comm.size} ranks give one; give it on all ranks, or"):
        Mesh(comm, tuning=tuning if gives[giver] else None)
    with Mesh(comm) as mesh:
        mesh.barrier()


@pytest.mark.mpi
def test_values_are_those_of_rank_0(comm):
    with Mesh(comm, tuning=Tuning(DOUBLES if comm.rank == 0 else RINGS, 64 + comm.rank)) as mesh:
        assert mesh.tuning == Tuning(DOUBLES, 64) and mesh.data.ring.constants == DOUBLES
    with pytest.raises(ValueError, match="not int"):
        Mesh(comm, tuning=5)


@pytest.mark.mpi(min_size=2)
def test_a_file_of_another_place_is_taken_with_one_line(comm, write, capsys):
    with Mesh(comm) as mesh:
        here = place_of(mesh.data.ring)
    assert here.ranks == comm.size and here.nodes * here.ranks_per_node == comm.size
    there = {"ranks": 1000, "nodes": 10, "ranks_per_node": 100}
    with Mesh(comm, tuning=write(**{**vars(here), **there})):
        told = capsys.readouterr().err.splitlines()
    assert len(told) == (comm.rank == 0)
    if told:
        there = f"1000 ranks on 10 nodes, 100 on each, with {here.mpi}"
        assert told[0].startswith(f"note: the tuning was measured on {there}, and here sums go over {here}; other")
    with Mesh(comm, tuning=write(**{**vars(here), "mpi": "Another MPI"})):
        assert ("with Another MPI, and here" in capsys.readouterr().err) == (comm.rank == 0)
    with Mesh(comm, tuning=write(**vars(here))):
        assert capsys.readouterr().err == ""


@pytest.mark.mpi(min_size=3)
def test_nodes_with_unequally_many_ranks_are_told_from_others(comm, write, capsys, monkeypatch):
    monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank == 0)
    with Mesh(comm, tuning=write(mpi="MPI")):
        told = capsys.readouterr().err
    if comm.rank == 0:
        assert "measured on 4 ranks on 2 nodes, 2 on each, with MPI, and here" in told
        assert f"over {comm.size} ranks on 2 nodes, unequally many on each, with " in told


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("constants", EXTREMES)
def test_on_one_node_no_constants_change_a_bit(comm, peers, shared_seed, constants):
    """auto, of arrays in shared memory and elsewhere, against the ring."""
    values = np.random.default_rng(shared_seed + comm.rank).standard_normal(1 << 18)
    with Mesh(comm, tuning=Tuning(constants)) as mesh:
        auto, ring = AllReduce(mesh), AllReduce(mesh, algorithm="ring")
        for length in (1, 1000, 9000, 1 << 18):
            wanted = ring(values[:length].copy())
            elsewhere, window = values[:length].copy(), auto.empty(length, np.float64)
            window[:] = values[:length]
            assert auto(elsewhere).tobytes() == auto(window).tobytes() == wanted.tobytes()
            del window
        staged = all_reduce(mesh.data.ring, values[:8]).algorithm
        assert staged == ("windows" if constants.largest_staged >= 64 else "ring")


@pytest.mark.mpi(min_size=3)
def test_a_choice_that_takes_doubling_on_one_node_would_be_seen(comm, shared_seed, monkeypatch):
    """The law above against a planted choice: from three ranks on its sums round otherwise."""
    values = np.random.default_rng(shared_seed + comm.rank).standard_normal(1 << 14)
    monkeypatch.setattr(
        "hpctrain.comm.allreduce.choose", lambda algorithm, *_: {"auto": "doubling"}.get(algorithm, "ring")
    )
    with Mesh(comm) as mesh:
        auto, ring = AllReduce(mesh)(values.copy()), AllReduce(mesh, algorithm="ring")(values.copy())
        assert auto.tobytes() != ring.tobytes()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("constants, wanted", [(DOUBLES, "doubling"), (RINGS, "ring")], ids=["doubling", "ring"])
def test_between_nodes_constants_choose_how_messages_go(comm, monkeypatch, constants, wanted):
    monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank)
    with Mesh(comm, tuning=Tuning(constants)) as mesh:
        assert place_of(mesh.data.ring).nodes == comm.size
        for length in (1, 200_000):
            array = np.arange(length) % 7.0
            operation = AllReduce(mesh).prepare(array)
            assert operation.algorithm == wanted
            operation.run()
            assert (array == np.arange(length) % 7 * comm.size).all()


@pytest.mark.mpi(min_size=4)
def test_constants_choose_how_the_sums_of_nodes_cross(comm, monkeypatch):
    """Between two nodes: one message a rank by doubling, two by the ring."""
    if comm.size % 2:
        pytest.skip("two nodes")
    monkeypatch.setattr(nodes, "name_of_node", lambda: comm.rank % 2)
    for constants, num_messages in ((DOUBLES, 1), (RINGS, 2)):
        with Mesh(comm, tuning=Tuning(constants)) as mesh:
            array = AllReduce(mesh).empty(comm.size * 20_000, np.float64)
            array[:] = comm.rank
            AllReduce(mesh)(array)
            assert (array == sum(range(comm.size))).all()
            assert mesh.data.ring.counters.messages_sent == num_messages
            del array


@pytest.mark.parametrize(
    "make, what",
    [
        (lambda path: path.mkdir(), "not a file; measure again"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "not a whole file of JSON; measure again"),
        (lambda path: path.write_bytes(b" " * (MOST_BYTES + 1)), f"larger than {MOST_BYTES} bytes, so"),
        (lambda path: path.symlink_to("nowhere"), "No such file or directory; measure again"),
        (lambda path: None, "No such file or directory; measure again"),
    ],
)
def test_what_is_no_file_of_text_is_told(tmp_path, make, what):
    path = tmp_path / "tuning.json"
    make(path)
    with pytest.raises(ValueError) as caught:
        read_tuning(path, "--tuning")
    assert str(caught.value).startswith(f"--tuning {path}: {what}") and "\n" not in str(caught.value)


def test_a_name_that_no_file_can_have_is_told():
    for name in ("", "a\0b", "x" * 5000):
        with pytest.raises(ValueError, match="^--tuning "):
            read_tuning(name, "--tuning")


def test_one_process_takes_a_tuning_too(tmp_path):
    (tmp_path / "tuning.json").write_text(json.dumps(WHOLE))
    with Mesh(None, tuning=tmp_path / "tuning.json") as mesh:
        assert mesh.tuning.bucket_bytes == 4194304
