from __future__ import annotations

import math

import pytest

from weft.errors import TrainingHalted
from weft.monitor.guards import NonFiniteGuard


def test_finite_steps_have_no_reason():
    guard = NonFiniteGuard(0)
    assert all(guard.observe(step, 4.0, 1.0) is None for step in range(1, 50))


@pytest.mark.parametrize(
    ("loss", "grad_norm", "reason"),
    [
        (math.nan, math.nan, "the loss is nan"),
        (math.inf, 1.0, "the loss is inf"),
        (4.0, math.inf, "the gradient norm is inf"),
        (4.0, math.nan, "the gradient norm is nan"),
    ],
)
def test_reason_names_the_cause(loss, grad_norm, reason):
    assert NonFiniteGuard(1).observe(7, loss, grad_norm) == reason


def test_limit_is_inclusive_and_one_good_step_resets_it():
    guard = NonFiniteGuard(2)
    for step in (1, 2, 4, 5):
        assert guard.observe(step, math.nan, 1.0)
        if step == 2:
            assert guard.observe(3, 4.0, 1.0) is None
    with pytest.raises(TrainingHalted) as caught:
        guard.observe(6, 4.0, math.nan)
    assert str(caught.value) == (
        "train.max_bad_steps=2: the loss or gradient was not finite at 3 steps in a row (4 to 6); the last:"
        " the gradient norm is nan. Lower optimizer.lr or lengthen schedule.warmup_steps, and run the command again"
    )


def test_limit_of_zero_halts_immediately_with_advice():
    with pytest.raises(
        TrainingHalted, match=r"the loss was not finite at step 1; .*No step was finite: check the data"
    ):
        NonFiniteGuard(0).observe(1, math.nan, 0.0)
    with pytest.raises(
        TrainingHalted, match=r"the gradient was not finite at step 9; .*use bf16 or fp32 instead of fp16"
    ):
        NonFiniteGuard(0).observe(9, 1.0, math.inf)


def test_fp16_overflows_count_only_at_the_minimum_loss_scale():
    guard = NonFiniteGuard(1)
    for step in range(1, 17):
        assert guard.observe(step, 4.0, math.inf, loss_scale=2.0**17 / 2**step) is not None
    assert guard.observe(17, 4.0, math.inf, loss_scale=1.0) == "the gradient norm is inf"
    with pytest.raises(TrainingHalted):
        guard.observe(18, 4.0, math.inf, loss_scale=0.5)
    with pytest.raises(TrainingHalted):  # A non-finite loss does not depend on the scale.
        NonFiniteGuard(0).observe(1, math.nan, math.inf, loss_scale=65536.0)
