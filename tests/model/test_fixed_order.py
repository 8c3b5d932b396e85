"""Products and orthonormal columns whose bits do not depend on who computes them."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from hpctrain.model.fixed_order import multiply, orthogonal

DIGEST = """
import hashlib, torch
from hpctrain.model.fixed_order import multiply, orthogonal
torch.set_num_threads(int({threads}))
drawn = [torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows), dtype=torch.float64).float()
         for rows in (3000, 700)]
left, out = orthogonal(drawn[0]), torch.zeros(3000, 700)
multiply(left, drawn[1], out)
print(*(hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in (drawn[0], drawn[1], left, out)))
"""


def drawn(rows, columns, seed=0, dtype=torch.float64):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns))).to(dtype)


def is_orthonormal(matrix, tolerance):
    return torch.allclose(matrix.T @ matrix, torch.eye(matrix.shape[1], dtype=matrix.dtype), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("rows, columns", [(2, 1), (5, 4), (37, 3), (1001, 16)])
def test_columns_become_orthonormal_and_span_what_they_did(rows, columns, dtype, tolerance):
    matrix = drawn(rows, columns, dtype=dtype)
    found = orthogonal(matrix)
    assert found.dtype == dtype and is_orthonormal(found, tolerance)
    assert torch.allclose(found @ (found.T @ matrix), matrix, rtol=0, atol=100 * tolerance)


@pytest.mark.parametrize("factor", [0.0, 1e-300, 1e300])
def test_of_columns_that_depend_on_each_other_or_are_zero_come_others(factor):
    matrix = drawn(9, 4) * factor
    matrix[:, 2] = 2 * matrix[:, 0] - matrix[:, 1]
    found = orthogonal(matrix)
    assert is_orthonormal(found, 1e-14)
    assert torch.allclose(found @ (found.T @ matrix), matrix, rtol=1e-12, atol=1e-12 * factor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden(bad):
    matrix = drawn(5, 2)
    matrix[3, 1] = bad
    assert orthogonal(matrix).isnan().all()


@pytest.mark.parametrize("rows, columns, rank", [(5, 7, 1), (300, 1000, 3), (3, 200000, 2), (200000, 3, 2)])
def test_a_product_is_one(rows, columns, rank):
    left, right = drawn(rows, rank), drawn(columns, rank, seed=1)
    out = torch.zeros(rows, columns, dtype=torch.float64)
    multiply(left, right, out)
    assert torch.allclose(out, left @ right.T, rtol=0, atol=1e-13)


def test_threads_and_processors_do_not_change_the_bits():
    told = set()
    for threads, capability, features in [(1, None, None), (2, "default", "AVX2 FMA3 AVX512F")]:
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads))
        if capability:
            environment |= {"ATEN_CPU_CAPABILITY": capability, "NPY_DISABLE_CPU_FEATURES": features}
        code = DIGEST.format(threads=threads)
        told.add(
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert len(told) == 1
