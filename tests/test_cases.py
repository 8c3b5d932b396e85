"""Every case names tests that exist, or a reason."""

import ast

import pytest

from tests.cases import CASES
from tests.harness.launch import ROOT


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_is_covered(case):
    assert case.tests or case.reason
    for test in case.tests:
        path, _, name = test.partition("::")
        assert name in functions(path), test


def test_no_case_is_named_twice():
    assert len({case.id for case in CASES}) == len(CASES)
