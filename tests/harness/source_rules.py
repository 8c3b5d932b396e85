"""The rules of the layout, checked by reading code: who imports whom, who may name MPI, and that nothing blocks in MPI.

`problems(module, source)` gives a line for each violation; `module` is the path inside the package, as `comm/ring.py`.
The first part of that path is the module's unit.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

MAX_FILE, MAX_FUNCTION = 260, 45  # lines

ROUTINES = {"plan", "config"}
PARTS = {"comm", "model", "tasks", "report", "launch"}
MAY_IMPORT = {  # siblings never import each other: what one needs of another comes as an argument from train
    "plan": set(),
    "config": {"plan"},
    "comm": {"plan"},
    **dict.fromkeys(PARTS - {"comm"}, ROUTINES),
    "train": ROUTINES | PARTS - {"launch"},
    "tools": ROUTINES | PARTS - {"launch"} | {"train"},
    "cli": ROUTINES | PARTS | {"train", "tools"},
    "__main__": {"cli", "comm"},
    "__init__": ROUTINES | PARTS | {"train"},
}
MAY_NAME_MPI = {"comm", "train", "tools", "__main__"}
NEEDS_NO_TORCH = {"plan", "config", "report", "launch", "cli", "__main__", "__init__"}
TORCH_LATER = {"comm", "tools"}  # only inside functions: where a torch buffer has arrived, torch is there already
STANDARD_ONLY = {"plan": set(), "config": {"tomli", "tomli_w"}}

COMPUTES = "Allreduce Reduce Reduce_scatter Reduce_scatter_block Scan Exscan"
MOVES = "Bcast Gather Gatherv Allgather Allgatherv Scatter Scatterv Alltoall Alltoallv Alltoallw Barrier"
MESSAGES = "Send Ssend Bsend Rsend Recv Sendrecv Sendrecv_replace Probe Mprobe Wait Waitall Waitany Waitsome"
MANAGES = "Dup Split Split_type Create Create_group Create_cart Free Finalize Disconnect Spawn Allocate_shared Fence"
BLOCKING = set(f"{COMPUTES} {MOVES} {MESSAGES} {MANAGES}".split())
PICKLING = {"send", "recv", "isend", "irecv", "sendrecv", "bcast", "scatter", "gather", "allgather", "allreduce"}
OF_A_COMM = {"barrier", "reduce", "scan", "exscan", "wait", "probe"}  # too common to forbid on other objects
ALLOWED = {  # what has no form that doesn't block; each stands behind a polite barrier
    ("comm/mesh.py", "Split"),
    ("comm/group.py", "Free"),
    ("comm/abort.py", "Finalize"),
    ("comm/windows.py", "Allocate_shared"),
    ("comm/windows.py", "Free"),
    ("comm/nodes.py", "Split"),
    ("comm/node.py", "Free"),
}
STATE = {"rank", "size", "world", "comm", "communicator"}


def problems(module: str, source: str) -> list[str]:
    """Every violation in one module of the package, as `module:line: what`."""
    tree = ast.parse(source)
    unit = module.split("/")[0].removesuffix(".py")
    rules = (_imports(unit, tree), _globals(tree), _calls(module, unit, tree), _lengths(source, tree))
    return [f"{module}:{line}: {what}" for rule in rules for line, what in rule]


def imports(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every import, also inside functions and by import_module: (node, full name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _name(node.func).endswith("import_module"):
            yield from ((node, each.value) for each in node.args if isinstance(each, ast.Constant))


def _imports(unit: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    at_load, for_types = set(_outside_functions(tree)), _for_types(tree)
    for node, name in imports(tree):
        top, *rest = name.split(".")
        if top == "hpctrain" and rest and rest[0] in MAY_IMPORT and rest[0] not in MAY_IMPORT[unit] | {unit}:
            yield node.lineno, f"{unit} must not import {rest[0]}"
        if node in for_types:
            continue
        if top == "mpi4py" and unit not in MAY_NAME_MPI:
            yield node.lineno, f"{unit} must not name MPI"
        if top in ("torch", "cupy") and (unit in NEEDS_NO_TORCH or unit in TORCH_LATER and node in at_load):
            yield node.lineno, f"{unit} must not load {top}"
        if unit in STANDARD_ONLY and top not in sys.stdlib_module_names | STANDARD_ONLY[unit] | {"hpctrain"}:
            yield node.lineno, f"{unit} must not import {top}: standard library only"


def _globals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, "a global statement"
    for node in _outside_functions(tree):
        if isinstance(node, ast.Attribute) and _name(node).startswith(("MPI.COMM_", "mpi4py.MPI.COMM_")):
            yield node.lineno, f"{_name(node)} at module level"
        if isinstance(node, ast.Call) and _name(node.func).startswith(("MPI.", "mpi4py.")):
            yield node.lineno, f"{_name(node.func)}() at module level"
    for statement in tree.body:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        for target in targets:
            if isinstance(target, ast.Name) and target.id.lower().lstrip("_") in STATE:
                yield statement.lineno, f"{target.id} as a global: no module knows its rank"


def _calls(module: str, unit: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        call, receiver = node.func.attr, _name(node.func.value)
        if call in BLOCKING and (module, call) not in ALLOWED:
            yield node.lineno, f"{call} blocks inside MPI"
        if unit in MAY_NAME_MPI and call in PICKLING and not receiver.startswith("torch"):
            yield node.lineno, f"{call} pickles"
        if call in OF_A_COMM and receiver.lower().endswith(("comm", "comm_world")):
            yield node.lineno, f"{call} of a communicator blocks inside MPI"


def _lengths(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    lines = len(source.splitlines())
    if lines > MAX_FILE:
        yield lines, f"a file of {lines} lines holds two nouns"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
            yield node.lineno, f"{node.name} has {length} lines"


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that run when the module is loaded."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _outside_functions(child)


def _for_types(tree: ast.Module) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING:`, which never runs."""
    ifs = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    bodies = (block.body for block in ifs if _name(block.test).endswith("TYPE_CHECKING"))
    return {node for body in bodies for statement in body for node in ast.walk(statement)}


def _name(node: ast.AST) -> str:
    """`self.comm.Send` as text; what is no chain of names is left out."""
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""
