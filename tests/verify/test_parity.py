"""Differences between two trainings are detected in any value, and down to float64 resolution."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from weft.verify.parity import ParityResult


def result() -> ParityResult:
    grads = {name: torch.tensor([1.0, -2.0], dtype=torch.float64) for name in ("a", "b", "c")}
    return ParityResult([3.0, 2.5], [1.0, 0.5], grads, copy.deepcopy(grads))


@pytest.mark.parametrize("what", ["losses", "grad_norms"])
@pytest.mark.parametrize("step", [0, 1])
def test_step_metrics_are_compared_in_float64(what, step):
    other = result()
    getattr(other, what)[step] *= 1 + 1e-9
    scale = abs(getattr(other, what)[step] / max(getattr(other, what)))
    assert other.largest_difference(result()) == pytest.approx(1e-9 * scale, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_value_is_never_equal(bad):
    for what in ("losses", "grad_norms"):
        other = result()
        getattr(other, what)[1] = bad
        assert not other.largest_difference(result()) < 1e300, what
    for what in ("grads", "weights"):
        for name in ("a", "b", "c"):
            other = result()
            getattr(other, what)[name][1] = bad
            assert not other.largest_difference(result()) < 1e300, (what, name)
            assert not result().largest_difference(other) < 1e300, (what, name)


def test_equal_results_have_zero_difference():
    assert result().largest_difference(result()) == 0.0
