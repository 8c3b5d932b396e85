"""All ranks agree on what they train, before torch is loaded: on devices, one each, or on the host."""

import pytest

from hpctrain.comm.mesh import Mesh
from hpctrain.config import Config
from hpctrain.plan.devices import Sight
from hpctrain.train import devices
from hpctrain.train.errors import AgreedError
from tests.harness.launch import run_python


def choose(comm, monkeypatch, seen, device="auto", servers=0):
    """`seen(rank)`: the devices of that rank."""
    with Mesh(comm) as mesh:

        def look(world):
            found = seen(world.rank)
            return Sight(f"n{world.rank}", 1, found, None if found else "no CUDA driver", "13.0", True)

        monkeypatch.setattr(devices, "look", look)
        return devices.choose(Config(device=device, servers=servers), mesh.world)


@pytest.mark.mpi(min_size=2)
def test_each_rank_takes_the_device_of_its_place_on_the_node(comm, monkeypatch):
    config, number = choose(comm, monkeypatch, lambda rank: ["a", "b"])
    assert config.device == "cuda" and number == comm.rank % 2


@pytest.mark.mpi(min_size=2)
def test_servers_take_none_and_are_not_asked(comm, monkeypatch):
    def seen(rank):
        return ["a"] if rank < comm.size - 1 else pytest.fail("a server was asked")

    config, number = choose(comm, monkeypatch, seen, servers=1)
    assert config.device == "cuda" and number == (0 if comm.rank < comm.size - 1 else None)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", ("auto", "cuda"))
def test_one_rank_that_fell_back_to_the_host_is_named_on_all_ranks(comm, monkeypatch, device):
    with pytest.raises(AgreedError) as caught:
        choose(comm, monkeypatch, lambda rank: [] if rank == 1 else ["a"], device)
    assert str(caught.value).startswith(f"--device {device}: rank 1 on n1 sees no CUDA device, rank 0 on n0 does")


@pytest.mark.mpi(min_size=2)
def test_without_devices_all_train_on_the_host_and_nobody_is_asked_where_that_is_wanted(comm, monkeypatch):
    assert choose(comm, monkeypatch, lambda rank: [])[1] is None
    config, number = choose(comm, monkeypatch, lambda rank: pytest.fail("asked"), "cpu")
    assert config.device == "cpu" and number is None


def test_a_rank_on_a_device_multiplies_in_float32_and_calls_its_hooks_in_one_thread(monkeypatch):
    import torch

    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert devices.take(None) == torch.device("cpu") and not taken
    with torch.autograd.set_multithreading_enabled(True):
        assert devices.take(1) == torch.device("cuda", 1) and taken == [1]
        assert not torch._C._is_multithreading_enabled() and not torch.backends.cudnn.allow_tf32


def test_a_device_without_a_number_is_the_current_one(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    named = ["cuda", "cuda:1", "cpu", torch.device("cuda")]
    assert [str(devices.numbered(each)) for each in named] == ["cuda:2", "cuda:1", "cpu", "cuda:2"]


def test_a_device_that_cannot_be_had_is_one_line_and_leaves_no_folder(tmp_path):
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    argv = ["-m", "hpctrain", "--device", "cuda", "--steps", "1", "--run-dir", tmp_path / "run"]
    result = run_python(*argv, timeout=60, env=hidden)
    assert result.returncode == 2 and not (tmp_path / "run").exists()
    (line,) = result.stderr.splitlines()
    assert line.startswith("hpctrain: --device cuda: rank 0 on ") and line.endswith("--require cuda` tells more")
