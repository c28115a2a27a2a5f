from __future__ import annotations

import pytest
import torch

from weft.optim.step_decision import clip_factor, global_norm


def test_norm_of_several_tensors_equals_the_flat_norm():
    grads = [torch.randn(4, 5, dtype=torch.float64), torch.randn(7, dtype=torch.float64)]
    flat = torch.cat([grad.flatten() for grad in grads])
    assert float(global_norm(grads)) == pytest.approx(float(flat.norm()), rel=1e-14)


def test_norm_of_half_precision_does_not_overflow():
    assert float(global_norm([torch.full((4,), 60_000.0, dtype=torch.float16)])) == pytest.approx(120_000)


def test_norm_of_no_gradients_is_zero():
    assert float(global_norm([])) == 0.0


@pytest.mark.parametrize(
    ("norm", "max_norm", "factor"),
    [(2.0, 1.0, 1 / (2 + 1e-6)), (0.5, 1.0, 1.0), (5.0, 0.0, 1.0), (0.0, 1.0, 1.0)],
)
def test_clip_factor_never_exceeds_one(norm, max_norm, factor):
    assert clip_factor(norm, max_norm) == factor
