"""What pip is told about the package: its version, its command, its files, and every package that it imports."""

import ast
import re
import runpy
import sys
from importlib.metadata import packages_distributions

import pytest
import setuptools

import hpctrain
from tests.harness.launch import ROOT
from tests.harness.source_rules import imports
from tests.harness.wheel import faults, wanted

NOT_INSTALLED = {"cupy": ["cupy-cuda12x"], "tomli": ["tomli"]}  # on a machine without a GPU; on a newer Python
OPTIONAL = {"mpi": "mpi4py", "data": "sklearn PIL tokenizers", "report": "tensorboard"}


@pytest.fixture(scope="module")
def told() -> dict:
    """The arguments of setup()."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", lambda **arguments: kept.update(arguments))
        kept = {}
        runpy.run_path(str(ROOT / "setup.py"))
    return kept


def names(requirements) -> set[str]:
    return {re.match(r"[\w-]+", each)[0] for each in requirements}


def imported(folder: str) -> set[str]:
    """The packages that modules in `folder` import, neither our own nor Python's, as pip names them."""
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / folder).rglob("*.py")]
    tops = {name.split(".")[0] for tree in modules for _, name in imports(tree)}
    known = NOT_INSTALLED | packages_distributions()
    own = {"hpctrain", "tests", "a_module_that_is_not_installed"}
    own |= {path.stem for path in (ROOT / "benchmarks").rglob("*.py")}  # which import each other from beside
    return {known[top][0].lower().replace("_", "-") for top in tops - own - sys.stdlib_module_names}


def test_the_version_is_that_of_the_package(told):
    assert told["version"] == hpctrain.__version__


def test_the_command_starts_main(told):
    (script,) = told["entry_points"]["console_scripts"]
    name, module, function = re.fullmatch(r"(.+)=(.+):(.+)", script).groups()
    assert name == "hpctrain" and (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
    assert f"def {function}(" in (ROOT / module.replace(".", "/")).with_suffix(".py").read_text()


def test_every_package_of_the_checkout_is_installed(told):
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "hpctrain").rglob("*.py")}
    assert set(told["packages"]) == {".".join(folder.parts) for folder in folders}


def test_all_job_scripts_and_benchmarks_are_installed_in_their_folders(told):
    files = dict(told["data_files"])
    assert set(files["share/hpctrain/jobs"]) == {f"jobs/{path.name}" for path in (ROOT / "jobs").iterdir()}
    for folder, places in files.items():
        assert {f"share/hpctrain/{place}".rpartition("/")[0] for place in places} == {folder}
    places = sorted(place for places in files.values() for place in places)
    assert [f".data/data/share/hpctrain/{place}" for place in places] == [p for p in wanted() if p.startswith(".")]


def test_what_the_package_imports_is_required_or_in_an_extra(told):
    extras = told["extras_require"]
    optional = names(each for extra in ("mpi", "gpu", *OPTIONAL) for each in extras[extra])
    assert imported("hpctrain") <= names(told["install_requires"]) | optional


def test_what_the_tests_import_is_in_the_extra_that_make_venv_installs(told):
    extras = told["extras_require"]
    installed = names([*told["install_requires"], *extras["test"], *extras["mpi"]])
    assert imported("tests") - names(extras["gpu"]) <= installed  # tests/gpu runs where CuPy is there
    assert set(extras["data"]) | set(extras["report"]) <= set(extras["test"])
    assert '--editable ".[test]"' in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("extra, packages", OPTIONAL.items())
def test_an_extra_brings_what_it_is_for(told, extra, packages):
    known = packages_distributions()
    assert {known[each][0].lower() for each in packages.split()} <= names(told["extras_require"][extra])


def test_a_wheel_that_lacks_a_file_or_has_one_too_many_is_found():
    whole = [place.replace(".data/", "hpctrain-1.data/", place.startswith(".")) for place in wanted()]
    whole.append("hpctrain-1.dist-info/RECORD")
    assert faults(whole, wanted()) == []
    assert faults([*whole, "hpctrain/old.py"], wanted()) == ["it has hpctrain/old.py too much"]
    for place in ("hpctrain/cli.py", "hpctrain/comm/ring.py"):
        assert faults([each for each in whole if each != place], wanted()) == [f"it lacks {place}"]
    no_jobs = [each for each in whole if "/env.sh" not in each]
    assert faults(no_jobs, wanted()) == ["it lacks .data/data/share/hpctrain/jobs/env.sh"]
