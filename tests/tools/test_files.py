"""The files that come with the package are found however it was installed, and copied over nothing."""

from importlib import metadata
from pathlib import Path

import pytest

import hpctrain
from hpctrain.tools import files
from tests.harness.launch import ROOT

JOBS = sorted(f"jobs/{path.name}" for path in (ROOT / "jobs").iterdir())


class Noted:
    """An entry of what pip noted down, as importlib.metadata gives it."""

    def __init__(self, place: str, site_packages: Path):
        self.place, self.site_packages = place, site_packages

    def as_posix(self):
        return self.place

    def locate(self):
        return self.site_packages / self.place


def make(path: Path, text: str = "text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def install(monkeypatch, site_packages: Path, places) -> None:
    """Makes the package lie in `site_packages`, and pip have noted `places`, relative to it."""
    monkeypatch.setattr(hpctrain, "__file__", str(make(site_packages / "hpctrain/__init__.py", "")))
    monkeypatch.setattr(metadata, "files", lambda name: [Noted(place, site_packages) for place in places])


def test_a_checkout_has_them_beside_the_package(capsys):
    assert files.run([], None) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "/jobs/" in line] == [str(ROOT / place) for place in JOBS]
    assert all(Path(line).is_file() for line in printed)


@pytest.mark.parametrize(
    "site_packages, noted, share",
    [
        ("lib/python3.12/site-packages", "../../../share", "share"),  # a virtual environment, --user
        ("target", "../../share", "target/share"),  # --target: noted before pip moves the files
        ("site-packages", "share", "site-packages/share"),
    ],
)
def test_an_installation_has_them_where_pip_noted_them(tmp_path, monkeypatch, site_packages, noted, share):
    env, deep = (make(tmp_path / share / "hpctrain" / name) for name in ("jobs/env.sh", "benchmarks/a/b.py"))
    make(tmp_path / site_packages / "jobs/of-somebody-else")
    inside = ("jobs/env.sh", "benchmarks/a/b.py", "jobs/removed.sh", "benchmarks/a/__pycache__/b.pyc")
    make(tmp_path / share / "hpctrain" / inside[-1])
    places = [f"{noted}/hpctrain/{place}" for place in inside]
    install(monkeypatch, tmp_path / site_packages, ["hpctrain/__init__.py", "../../../bin/hpctrain", *places])
    assert files.installed() == {"benchmarks/a/b.py": deep, "jobs/env.sh": env}


def refuse(name):
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("noted", [lambda name: None, lambda name: [], refuse])
def test_where_they_are_nowhere_one_line_says_so(tmp_path, monkeypatch, capsys, noted):
    install(monkeypatch, tmp_path, [])
    monkeypatch.setattr(metadata, "files", noted)
    assert files.run([], None) == 1
    line = "hpctrain files: the job scripts are not there; reinstall hpctrain by pip, or take jobs/ from its source\n"
    assert capsys.readouterr() == ("", line)


def test_a_copy_has_the_same_bytes_and_says_where(tmp_path, capsys):
    folder = tmp_path / "new" / "mine"
    assert files.run([str(folder)], None) == 0
    copied = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert copied.keys() == files.installed().keys() >= set(JOBS)
    assert capsys.readouterr().out.splitlines() == [str(copied[place]) for place in files.installed()]
    for place, source in files.installed().items():
        assert copied[place].read_bytes() == source.read_bytes(), place


def test_an_existing_file_is_named_and_nothing_is_copied(tmp_path, capsys):
    mine = make(tmp_path / JOBS[-1], "mine")
    assert files.run([str(tmp_path)], None) == 2
    assert capsys.readouterr().err == f"hpctrain files: {mine}: exists already; nothing was copied\n"
    assert mine.read_text() == "mine" and [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    file = make(tmp_path / "file")
    assert files.run([str(file)], None) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"hpctrain files: {file}") and said.count("\n") == 1


@pytest.mark.parametrize("argv", [["a", "b"], ["--to", "a"], ["-f"], [""]])
def test_a_wrong_command_line_is_one_line(argv, capsys):
    assert files.run(argv, None) == 2
    line = f"hpctrain files: {' '.join(argv)}: not one folder; usage: python -m hpctrain files [FOLDER]\n"
    assert capsys.readouterr().err == line


def test_a_rank_that_is_not_the_first_stays_silent(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert files.run([str(tmp_path)], None) == 0
    assert capsys.readouterr() == ("", "") and not list(tmp_path.iterdir())
