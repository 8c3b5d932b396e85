"""Training whose gradient sums travel as bfloat16: near what it was, the same bits on all replicas, half the bytes."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain import DataParallel, Mesh
from hpctrain.comm import nodes
from hpctrain.config import Config
from hpctrain.model.weights import combined, fingerprints
from hpctrain.train import build
from hpctrain.train.build import build_executor
from hpctrain.train.errors import AgreedError
from hpctrain.train.run import note_compression
from tests.oracles.compressed_sum import compressed_ring
from tests.train.loops import assert_learns_in_a_join, loss_of, net, share
from tests.train.test_equivalence import TASKS, part_of, settings
from tests.train.test_executor import executor_of
from tests.train.toys import Masked, run

LAYOUTS = {
    "ring": {"allreduce": "ring"},
    "doubling": {"allreduce": "doubling"},
    "shared optimizer": {"shard_optimizer": True, "allreduce": "ring"},
    "1f1b": {"stages": 2, "num_microbatches": 4, "allreduce": "ring"},
    "1f1b-async": {"stages": 2, "num_microbatches": 4, "allreduce": "ring", "schedule": "1f1b-async"},
    "2bw": {"stages": 2, "num_microbatches": 4, "allreduce": "ring", "schedule": "2bw"},
}


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("layout, precision", [*((layout, "float32") for layout in LAYOUTS), ("ring", "float64")])
def test_it_learns_nearly_as_much_and_all_replicas_hold_the_same_bits(comm, layout, precision):
    if (part := part_of(comm, 4)) is None:
        return
    how = {"precision": precision, **settings("sgd", 24), **LAYOUTS[layout]}
    plain, _, _ = run(TASKS["masked"], part, **how)
    losses, weights, executor = run(TASKS["masked"], part, compress="bf16", **how)
    assert losses != plain and losses == pytest.approx(plain, rel=0.02)
    assert plain[-1] < 0.95 * plain[0]
    hashes = part.allgather(combined(fingerprints(executor.stage.named_parameters())))
    assert len(set(hashes)) == LAYOUTS[layout].get("stages", 1)
    assert {each["compress"] for each in executor.update.reduction.figures()} == {"bf16"}
    assert len(set(part.allgather(combined(fingerprints(weights))))) == 1
    part.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_shared_optimizer_gives_the_bits_of_a_whole_one(comm, optimizer):
    """For weights travel as they are."""
    how = {"steps": 6, "precision": "float32", "compress": "bf16", **settings(optimizer, 13)}
    whole, weights, _ = run(TASKS["unused"], comm, allreduce="ring", **how)
    shared, theirs, _ = run(TASKS["unused"], comm, shard_optimizer=True, allreduce="ring", **how)
    assert shared == whole and fingerprints(theirs) == fingerprints(weights)


def sent(comm, **how) -> int:
    """Bytes of all ranks in a step."""
    executor, actions, mesh = executor_of(comm=comm, task=Masked(), global_batch_size=16, precision="float32", **how)
    before = mesh.data.ring.counters.bytes_sent
    executor.run(actions, 0)
    total = comm.allreduce(mesh.data.ring.counters.bytes_sent - before)
    mesh.close()
    return total


@pytest.mark.mpi(min_size=2)
def test_gradients_take_half_the_bytes_and_weights_as_many_as_before(comm):
    whole = sent(comm, allreduce="ring")
    assert sent(comm, allreduce="ring", compress="bf16") == whole / 2
    assert sent(comm, shard_optimizer=True) == whole
    assert sent(comm, shard_optimizer=True, allreduce="ring", compress="bf16") == whole * 3 / 4
    assert sent(comm, shard_optimizer=True, compress="bf16") == whole
    assert sent(comm, allreduce="windows", compress="bf16") == 0


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", [{}, {"shard_optimizer": True}], ids=["whole", "shared"])
def test_on_one_node_auto_trains_to_the_bits_of_none(comm, monkeypatch, how):
    how = {"steps": 3, "precision": "float32", **settings("sgd", 13), **how}
    told = []
    for has_room in (True, False):
        if not has_room:
            monkeypatch.setattr(nodes, "has_room", lambda *_: False)
        for compress in ("none", "bf16"):
            _, weights, executor = run(TASKS["masked"], comm, compress=compress, **how)
            told.append(fingerprints(weights))
            assert {each["compress"] for each in executor.update.reduction.figures()} == {"none"}
    assert all(each == told[0] for each in told)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("allreduce, told", [("auto", True), ("windows", True), ("ring", False)])
def test_one_line_says_where_no_message_carries_gradients(comm, capfd, allreduce, told):
    config = Config(compress="bf16", allreduce=allreduce, global_batch_size=8)
    with Mesh(comm) as mesh:
        executor = build_executor(config, Masked(), mesh)
        assert {each["compress"] for each in executor.update.reduction.figures()} == {"none" if told else "bf16"}
        note_compression(config, executor, mesh)
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(": the")[0] for line in lines] == ["note: --compress bf16 has no effect"] * (
        told and comm.rank == 0
    )


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compress", ["topk:0.1", "powersgd:1"])
@pytest.mark.parametrize("allreduce, told", [("auto", True), ("ring", False)])
def test_one_line_says_where_less_would_be_sent_without_it(comm, capfd, compress, allreduce, told):
    config = Config(compress=compress, allreduce=allreduce, global_batch_size=8)
    with Mesh(comm) as mesh:
        note_compression(config, build_executor(config, Masked(), mesh), mesh)
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(" than")[0] for line in lines if line.startswith("note")] == [
        f" --compress {compress} sends more"
    ] * (told and comm.rank == 0)


@pytest.mark.mpi(min_size=2)
def test_a_stage_without_sums_says_nothing_of_its_own(comm, capfd):
    """Where another one sends, no line comes; where none has any, none either."""
    with Mesh(comm) as mesh:
        for wires, told in ([[], ["bf16"]], False), ([[], []], False), ([[], ["none"]], True):
            collectives = [SimpleNamespace(wire=wire) for wire in wires[mesh.rank > 0]]
            update = SimpleNamespace(reduction=SimpleNamespace(collectives=collectives))
            note_compression(Config(compress="bf16"), SimpleNamespace(update=update), mesh)
            assert ("has no effect" in capfd.readouterr().err) == (told and comm.rank == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loop_of_ones_own_gets_the_sum_of_the_oracle(comm, reduction):
    with Mesh(comm) as mesh:
        plain = net(dtype=torch.float32)
        how = {"algorithm": "ring", "compress": "bf16", "bucket_bytes": 1 << 30}
        model = DataParallel(net(dtype=torch.float32), mesh, reduction, **how)
        loss_of(plain, share(0, mesh, dtype=torch.float32)).backward()
        loss_of(model, share(0, mesh, dtype=torch.float32)).backward()
        flat = model._gradients._flat.flat
        own = torch.zeros_like(flat)
        for name, place in model._gradients._flat.places.items():
            gradient = plain.get_parameter(name.removeprefix("module.")).grad
            if gradient is not None:
                own[place] = gradient.reshape(-1)
        expected = compressed_ring(comm.allgather(own.numpy()), mesh.size if reduction == "mean" else 1)
        assert flat.numpy().tobytes() == expected.tobytes()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_a_loop_of_ones_own_learns_with_it_also_in_a_join(comm, algorithm):
    with Mesh(comm) as mesh:
        model = DataParallel(net(dtype=torch.float32), mesh, algorithm=algorithm, compress="bf16")
        assert_learns_in_a_join(mesh, model, 10 + mesh.rank)


@pytest.mark.mpi
def test_what_cannot_be_compressed_is_refused_by_one_line(comm):
    with Mesh(comm) as mesh:
        with pytest.raises(
            ValueError, match=r"compress='bf16': first.weight is float16; only gradients of float32 and"
        ):
            DataParallel(net(dtype=torch.float16), mesh, compress="bf16")
        with pytest.raises(
            ValueError, match="compress='fp8': expected none, bf16, topk:FRACTION or powersgd:RANK, such as"
        ):
            DataParallel(net(), mesh, compress="fp8")


class Complex(Masked):
    """With a layer that no precision makes real."""

    def layers(self):
        return [lambda: nn.Linear(6, 6, dtype=torch.complex64), *super().layers()]


@pytest.mark.mpi
@pytest.mark.parametrize("compress", ["bf16", "topk:0.1", "powersgd:1"])
def test_a_run_refuses_what_cannot_be_compressed_on_all_ranks(comm, monkeypatch, compress):
    """Where the check of layers lets it pass."""
    monkeypatch.setattr(build, "checked_layer", lambda layer, *_: layer)
    words = f"^--compress {compress}: .*weight is complex64; only gradients of float32 and float64 are compressed$"
    with Mesh(comm) as mesh, pytest.raises(AgreedError, match=words):
        build_executor(Config(compress=compress, global_batch_size=8), Complex(), mesh)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree_about_it_are_told(comm):
    with Mesh(comm) as mesh, pytest.raises(AgreedError, match="compress='(bf16|none)'"):
        DataParallel(net(), mesh, compress="bf16" if mesh.rank else "none")
