"""Layers start and draw alike wherever they are."""

import torch
from torch import nn

from hpctrain.model.precision import Precision
from hpctrain.model.stage import Stage, build_stage
from hpctrain.model.weights import combined, fingerprints, save_weights

FLOAT64 = Precision("float64")
FACTORIES = [lambda: nn.Linear(3, 3), lambda: nn.Dropout(0.5), lambda: nn.Linear(3, 3)]


def test_a_layer_starts_with_the_same_values_on_whatever_stage_it_is():
    whole = build_stage(FACTORIES, 5, FLOAT64)
    last = build_stage(FACTORIES[2:], 5, FLOAT64, first=2)
    names = list(last.named_parameters())
    assert names == ["layers.2.weight", "layers.2.bias"]
    for name in names:
        assert torch.equal(whole.named_parameters()[name], last.named_parameters()[name])
    assert not torch.equal(whole.layers[0].weight, whole.layers[2].weight)


def test_dropout_depends_on_seed_step_and_micro_batch_only():
    inputs = torch.ones(50, 3)
    stage = build_stage(FACTORIES, 5, Precision())
    torch.manual_seed(1)
    first = stage.forward(inputs, 3, 2)
    torch.manual_seed(2)
    assert torch.equal(first, stage.forward(inputs, 3, 2))
    assert not torch.equal(first, stage.forward(inputs, 4, 2))
    assert not torch.equal(first, stage.forward(inputs, 3, 1))
    with stage.evaluating():
        assert torch.equal(stage.forward(inputs, 0, 0), stage.forward(inputs, 1, 1))
    assert not torch.equal(stage.forward(inputs, 0, 0), stage.forward(inputs, 1, 1))


def test_shared_tensors_are_named_once():
    shared = nn.Linear(2, 2)
    assert list(Stage([shared, shared], first=4).state()) == ["layers.4.weight", "layers.4.bias"]


def test_the_fingerprint_sees_name_dtype_shape_and_bits():
    tensors = {"b": torch.arange(6.0), "a": torch.zeros(2, dtype=torch.bfloat16), "scalar": torch.tensor(1.0)}
    lines = fingerprints(tensors)
    assert [line.split()[0] for line in lines] == ["a", "b", "scalar"]
    others = [
        {**tensors, "b": torch.arange(6.0).reshape(2, 3)},
        {**tensors, "b": torch.arange(6.0).double()},
        {**tensors, "b": torch.nextafter(torch.arange(6.0), torch.tensor(9.0))},
        {**{n: t for n, t in tensors.items() if n != "b"}, "c": torch.arange(6.0)},
    ]
    assert len({combined(fingerprints(each)) for each in [tensors, *others]}) == 5
    assert combined(lines) == combined(lines[::-1])


def test_weights_are_whole_or_not_there(tmp_path, monkeypatch):
    from safetensors import torch as safetensors

    stage = build_stage(FACTORIES, 5, Precision())
    save_weights(stage.state(), tmp_path / "model.safetensors")
    loaded = safetensors.load_file(tmp_path / "model.safetensors")
    (tmp_path / "other").touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert {name: t.tolist() for name, t in stage.state().items()} == {name: t.tolist() for name, t in loaded.items()}

    def fail(tensors, path, notes):
        path.write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors, "save_file", fail)
    try:
        save_weights({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    except OSError:
        pass
    assert set(safetensors.load_file(tmp_path / "model.safetensors")) == set(loaded)


def test_the_notes_of_a_weights_file_and_the_aliases_of_a_stage(tmp_path):
    from safetensors import safe_open

    shared = nn.Linear(2, 2, bias=False)
    stage = Stage([nn.Sequential(shared, nn.ReLU(), shared), shared])
    assert list(stage.state()) == ["layers.0.0.weight"]
    assert stage.aliases() == dict.fromkeys(["layers.0.2.weight", "layers.1.weight"], "layers.0.0.weight")
    save_weights(stage.state(), tmp_path / "a.safetensors", {"names": "layers"})
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "names": "layers"}
