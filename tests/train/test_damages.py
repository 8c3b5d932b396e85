"""Checkpoints that somebody changed are refused in a line, and nothing of them was taken; or they train on."""

import json
import re

import pytest
import torch

from hpctrain.train import checkpoint_files as files
from hpctrain.train.errors import AgreedError
from hpctrain.train.resume import find
from tests.soak.damages import REFUSED, TASKS, Subject, damage
from tests.soak.forgeries import seal

TENSORS = "optimizer/layers.0.weight/exp_avg"


def test_random_changes_by_accident_and_by_an_attacker(tmp_path):
    found, faults = damage(100, seed=20240229, root=tmp_path)
    assert not faults, "\n".join(faults)
    assert sum(found.values()) == 100 and len(found) >= 6, found


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    made = {name: Subject(name, tmp_path_factory.mktemp("runs")) for name in TASKS}
    yield made
    for each in made.values():
        each.mesh.close()


@pytest.fixture
def forged(subjects):
    """`forged(task, change)` changes the manifest by `change(it)`; the line with which it is refused."""

    def told(task, change) -> str:
        subject = subjects[task]
        manifest = json.loads((subject.whole / files.MANIFEST).read_bytes())
        del manifest["sha256"]
        change(manifest)
        seal(subject.whole, manifest)
        before = subject.bits()
        try:
            with pytest.raises(REFUSED) as error:
                subject.load(subject.whole)
        finally:
            subject.restore()
        assert subject.bits() == before
        return re.sub(r".*?/step-000003(/manifest.json)?: ", "", str(error.value))

    return told


def only(manifest, key):
    """The pieces of one tensor."""
    return [each for listed in manifest["contents"] for each in listed if each["key"] == key]


def test_what_a_manifest_says_of_the_run_is_looked_at(forged):
    for place, value in (
        (("items_seen", 0), "x"),
        (("items_seen", 0), -1.0),
        (("state", "rows"), -1),
        (("state", "rows"), 1e3),
        (("state", "seconds"), None),
        (("state", "metrics"), {"loss": "x"}),
        (("step",), 4),
        (("config", "lr"), "x"),
        (("config", "optimizer"), "inf"),
        (("config", "stages"), "inf"),
        (("layout", "stages"), None),
    ):

        def change(manifest, place=place, value=value):
            *above, last = place
            for key in above:
                manifest = manifest[key]
            manifest[last] = value

        name = place[0] if place[0] in ("items_seen", "layout") else place[-1]
        assert forged("masked", change).startswith(f"damaged, {name} is not what a run has"), place


def test_pieces_that_point_elsewhere_are_refused(forged):
    def larger(manifest):
        for each in only(manifest, "weights/layers.0.weight"):
            each["shape"] = [2**40, 2**20]
            each["stop"] = 2**60 if each["start"] else each["stop"]

    def backward(manifest):
        first, second = only(manifest, "weights/layers.0.weight")
        first["stop"], second["start"], second["stop"] = 90, 90, 48

    def empty(manifest):
        for each in only(manifest, "weights/layers.0.weight"):
            each.update(shape=[0, 2**62, 2**62], start=0, stop=0)

    def named(manifest):
        only(manifest, "weights/layers.0.weight")[0]["key"] = "a\nb"

    assert "has not so many bytes" in forged("masked", larger)
    for change in (backward, empty, named):
        assert "describes no tensor" in forged("masked", change)


def test_an_optimizers_state_is_all_there_and_of_its_dtype(forged):
    def without(manifest):
        manifest["contents"] = [[each for each in listed if each["key"] != TENSORS] for listed in manifest["contents"]]

    assert "which Adam does not keep" in forged("masked", without)


def test_rows_without_ids_are_refused(forged):
    def without(manifest):
        for listed in manifest["contents"]:
            listed[:] = [each for each in listed if not each["key"].endswith("/ids")]

    assert "has not a row of everything for each of its ids" in forged("recommender", without)


def test_state_of_another_dtype_is_refused(subjects):
    subject = subjects["masked"]
    pieces = [
        each._replace(values=each.values.float()) if each.key == TENSORS else each
        for each in subject.saving.state.pieces()
    ]
    manifest = files.read_manifest(subject.whole)
    subject.saving.state.pieces = lambda: iter(pieces)
    try:
        subject.cut(subject.whole)
        with pytest.raises(AgreedError, match=f"step-000003: {TENSORS} is torch.float32, and the parameter is"):
            subject.saving.load(subject.whole)
    finally:
        del subject.saving.state.pieces
        subject.restore()
    assert files.read_manifest(subject.whole) == manifest


def test_one_that_lists_a_file_elsewhere_is_told_and_the_one_before_it_is_taken(subjects, capsys):
    subject = subjects["masked"]
    newer = subject.whole.with_name("step-000004")
    manifest = {**files.read_manifest(subject.whole), "files": [{"name": "../x", "bytes": 1, "sha256": ""}]}
    newer.mkdir()
    try:
        seal(newer, {"format": files.FORMAT, **manifest})
        start = find(["--resume", "auto", "--run-dir", str(subject.root)], subject.mesh.world)
    finally:
        for path in newer.iterdir():
            path.unlink()
        newer.rmdir()
    assert start.checkpoint == subject.whole and "'../x' is not the name of a file" in capsys.readouterr().err


def test_a_setting_that_no_flag_would_take_is_told_by_its_flag(forged):
    assert forged("masked", lambda manifest: manifest["config"].update(lr=-1.0)).startswith("--lr: ")


def test_what_was_never_stepped_begins_as_the_optimizer_does(subjects):
    """Adagrad keeps something from the start, also where another optimizer had saved."""
    subject = subjects["mixing"]
    subject.saving.load(subject.whole, {**files.read_manifest(subject.whole), "config": {"optimizer": "other"}})
    states = subject.executor.optimizer.state
    fresh = type(subject.executor.optimizer)(states).state
    for parameter, state in states.items():
        assert state.keys() == fresh[parameter].keys()
        assert all(torch.equal(value, fresh[parameter][name]) for name, value in state.items())
    subject.saving.load(subject.whole)
