"""Every case names tests that exist, or a reason."""

import ast

import pytest

from tests.cases import CASES
from tests.harness.launch import ROOT

IDS = {
    "launch": "L01 L03 L04 L06 L07 L08 L09 L10",
    "ring": "B10 B12 B13 B21",
    "buffers": "B01 B06 B08 B16 B17 B19 B20",
    "bench": "Q01",
    "dtypes": "B03 B05",
    "dataparallel": "D01 D03 D06 D09 D12",
    "pipeline": "P01 P02 P04 P06 P08 P10 P11 P13 P15 P17 P18 P20 P21 P23 P27 P29",
    "ps": "S01 S03 S05 S10 S11 S12 S14 S15",
    "sparse": "S07 S08 D11",
    "numerics": "P24 D08 B14 B23 P25",
    "data": "A01 D04 D05",
    "ops": "O01",
    "checkpoint": "C01 C03 C05",
    "signals": "C06 C08",
    "gpu": "G01 G02 G03 G05 G06",
    "failure": "F01 F03 F04 F06 F07 F09 F10",
}


def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_case_is_covered(case):
    assert case.tests or case.reason
    for test in case.tests:
        path, _, name = test.partition("::")
        assert name in functions(path), test


def test_no_case_is_missing_or_named_twice():
    assert sorted(case.id for case in CASES) == sorted(" ".join(IDS.values()).split())
