"""The layout's rules hold in the whole package, and each rule turns red on a planted violation."""

import subprocess
import sys

import pytest

from tests.harness.launch import ROOT
from tests.harness.source_rules import ALLOWED, MAY_IMPORT, problems

PACKAGE = ROOT / "hpctrain"
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))

PLANTED = {
    "plan/x.py": [
        ("import numpy", "plan must not import numpy: standard library only"),
        ("def f():\n    import torch", "plan must not load torch"),
        ("from hpctrain.config import Config", "plan must not import config"),
        ("from hpctrain import config", "plan must not import config"),
        ("from importlib import import_module\nimport_module('hpctrain.comm.ring')", "plan must not import comm"),
    ],
    "config.py": [
        ("from mpi4py import MPI", "config must not name MPI"),
        ("import rich", "config must not import rich: standard library only"),
        ("def f():\n    from hpctrain.tasks.text import Text", "config must not import tasks"),
    ],
    "comm/x.py": [
        ("from hpctrain.model.stage import Stage", "comm must not import model"),
        ("def f():\n    import hpctrain.train.executor", "comm must not import train"),
        ("import torch", "comm must not load torch"),
        ("from mpi4py import MPI\nworld = MPI.COMM_WORLD", "MPI.COMM_WORLD at module level"),
        ("from mpi4py import MPI\nclass A:\n    level = MPI.Query_thread()", "MPI.Query_thread() at module level"),
        ("rank = 0", "rank as a global: no module knows its rank"),
        ("_world: object = None", "_world as a global: no module knows its rank"),
        ("def f():\n    global anything", "a global statement"),
        ("def f(comm):\n    comm.Send(b'')", "Send blocks inside MPI"),
        ("def f(self):\n    self.world.comm.Allreduce(1, 2)", "Allreduce blocks inside MPI"),
        ("def f(MPI, requests):\n    MPI.Request.Waitall(requests)", "Waitall blocks inside MPI"),
        ("def f(comm):\n    comm.Split(0, 0)", "Split blocks inside MPI"),
        ("def f(world):\n    return world.bcast(1)", "bcast pickles"),
        ("def f(self):\n    self.comm.barrier()", "barrier of a communicator blocks inside MPI"),
        ("def f():\n" + "    x = 1\n" * 45, "f has 46 lines"),
        ("x = 1\n" * 261, "a file of 261 lines holds two nouns"),
    ],
    "model/x.py": [
        ("from mpi4py import MPI", "model must not name MPI"),
        ("from hpctrain.comm.ring import Ring", "model must not import comm"),
    ],
    "launch/x.py": [
        ("from mpi4py import MPI", "launch must not name MPI"),
        ("from hpctrain.comm.environment import announced", "launch must not import comm"),
        ("def f():\n    import torch", "launch must not load torch"),
    ],
    "report/x.py": [("def f():\n    import torch", "report must not load torch")],
    "train/x.py": [
        ("from hpctrain.tools.doctor import run", "train must not import tools"),
        ("from hpctrain.cli import main", "train must not import cli"),
        ("def f(request):\n    request.Wait()", "Wait blocks inside MPI"),
    ],
    "tools/doctor.py": [("import torch", "tools must not load torch")],
}
INNOCENT = {
    "comm/x.py": """
        from __future__ import annotations
        from typing import TYPE_CHECKING
        from hpctrain.plan.ring import chunks
        if TYPE_CHECKING:
            import torch
        def f(comm, group, operation, torch):
            from mpi4py import MPI
            request = comm.Ibarrier()
            while not request.Test(): pass
            group.barrier()
            operation.wait()
            torch.gather(1, 2)
            return MPI.COMM_WORLD
    """,
    "comm/mesh.py": "def f(comm):\n    return comm.Split(0, 0)",
    "config.py": "import tomli_w",
    "model/x.py": "import torch\nfrom hpctrain.plan.ring import chunks\ndef f(x):\n    return x.gather(0, 1)",
}


@pytest.mark.parametrize("module", MODULES)
def test_the_package_keeps_the_rules(module):
    assert problems(module, (PACKAGE / module).read_text()) == []


@pytest.mark.parametrize(
    "module, source, what", [(module, *planted) for module, list_ in PLANTED.items() for planted in list_]
)
def test_a_planted_violation_is_found(module, source, what):
    assert what in [problem.split(": ", 1)[1] for problem in problems(module, source)]


@pytest.mark.parametrize("module", INNOCENT)
def test_what_is_allowed_is_not_reported(module):
    source = INNOCENT[module]
    lines = source.splitlines()[1:] if source.startswith("\n") else source.splitlines()
    assert problems(module, "\n".join(line.removeprefix(" " * 8) for line in lines)) == []


def test_every_module_belongs_to_a_unit():
    assert {module.split("/")[0].removesuffix(".py") for module in MODULES} <= MAY_IMPORT.keys()


def test_nothing_is_allowed_that_is_not_needed():
    missing = [(module, call) for module, call in ALLOWED if f".{call}(" not in (PACKAGE / module).read_text()]
    assert missing == []


def test_the_lower_floors_load_neither_torch_nor_mpi():
    floor = ["hpctrain", "hpctrain.config", "hpctrain.cli", "hpctrain.__main__", "hpctrain.tools.doctor"]
    floor += [
        f"hpctrain.{unit}.{path.stem}" for unit in ("plan", "launch") for path in (PACKAGE / unit).glob("[a-z]*.py")
    ]
    program = f"import sys, {', '.join(floor)}; print(*({{'torch', 'mpi4py', 'cupy'}} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert loaded.stdout.split() == []
