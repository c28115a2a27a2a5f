"""Top-k compression: only the largest values of each block of 4,096 are sent, in the bytes that the plan counts."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.wire.wire_format import find_wire
from weft.config.plan import Plan
from weft.errors import PlanError


def sent(name: str, x_RN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wire = find_wire(name)
    codes, _ = wire.encode(x_RN, None)
    return codes, wire.decode(codes, x_RN.shape[1], x_RN.dtype)


@given(
    st.integers(0, 10_000),
    st.sampled_from(["top:0.001", "top:0.02", "top:0.25"]),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_only_largest_values_of_each_block_are_sent(numel, name, dtype, seed):
    x_RN = torch.randn(2, numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codes, found = sent(name, x_RN)
    spec = find_wire(name).spec
    assert 0 <= codes.shape[1] - spec.num_bytes(numel) <= 1
    for first in range(0, numel, 4096):
        x, y = x_RN[:, first : first + 4096], found[:, first : first + 4096]
        number = math.ceil(spec.kept * x.shape[1] / 4096)
        least = x.abs().topk(number).values[:, -1:]
        assert not y[x.abs() < least].any()
        step = x.abs().amax(-1, keepdim=True) / 7 * (1 + 2**-7)
        assert ((y - x).abs() <= step / 2 * (1 + 1e-5))[x.abs() >= least].all()


def test_error_feedback_sends_almost_all_of_the_residual():
    wire, residual = find_wire("top:0.05"), torch.randn(1, 5000, dtype=torch.float64)
    before = residual.clone()
    for _ in range(80):
        residual = residual - wire.decode(wire.encode(residual, None)[0], 5000, residual.dtype)
    assert residual.norm() < 0.05 * before.norm()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_affects_only_its_block(value):
    x = torch.ones(1, 10_000)
    x[0, 5000] = value
    _, found = sent("top:0.02", x)
    assert not found[0, 4096:8192].isfinite().any()
    assert found[0, :4096].isfinite().all()
    assert found[0, 8192:].isfinite().all()


@pytest.mark.parametrize("share", ["0", "0.0", "0.3", "1", "x", "-0.1", ".02", "0.0000001"])
def test_invalid_share_is_rejected(share):
    with pytest.raises(PlanError) as caught:
        Plan.parse(f"dp_replicate=2 sync=diloco:5 compress=top:{share}")
    assert str(caught.value) == (
        f"compress=top:{share}: the share of values that are sent is above 0 and at most 0.25. Use compress=top:0.02."
    )
