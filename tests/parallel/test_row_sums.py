"""Sums of rows with equal indices, and joined tables without a rank's rows."""

from __future__ import annotations

import pytest
import torch

from weft.parallel.tables.row_sums import gather_rows, sum_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("number, rows", [(200, 7), (5, 5), (0, 0), (1, 3)])
def test_sums_are_those_of_torch_in_order(dtype, number, rows):
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(number, 4, generator=rng).to(dtype)
    index = torch.randint(max(rows, 1), (number,), generator=rng)
    want = torch.zeros(rows, 4, dtype=dtype)
    for place, row in enumerate(index.tolist()):
        want[row] += values[place]
    found = sum_rows(values, index, rows)
    assert found.shape == want.shape
    assert torch.equal(found, want) or dtype == torch.bfloat16
    assert torch.allclose(found.double(), want.double(), atol=0.2)


def test_gradient_of_gathered_rows_is_the_sum():
    rows = torch.randn(5, 3, requires_grad=True)
    index = torch.tensor([4, 0, 4, 1])
    factors = torch.arange(12.0).view(4, 3)
    (gather_rows(rows, index) * factors).sum().backward()
    assert torch.equal(rows.grad, torch.zeros(5, 3).index_add_(0, index, factors))
