from __future__ import annotations

from weft.optim.step_decision import LossScale


def test_scale_halves_on_overflow_and_doubles_after_good_steps():
    scale = LossScale(scale=1024.0, growth_interval=3)
    scale.update(finite=False)
    assert (scale.scale, scale.num_skipped) == (512.0, 1)
    for _ in range(2):
        scale.update(finite=True)
    assert scale.scale == 512.0
    scale.update(finite=True)
    assert scale.scale == 1024.0
    # An overflow resets the count of good steps.
    scale.update(finite=True)
    scale.update(finite=False)
    scale.update(finite=True)
    scale.update(finite=True)
    assert scale.scale == 512.0


def test_scale_is_at_least_one():
    scale = LossScale(scale=2.0)
    scale.update(finite=False)
    scale.update(finite=False)
    assert scale.scale == 1.0


def test_state_is_restored():
    scale = LossScale(scale=64.0, good_steps=5, num_skipped=2)
    other = LossScale()
    other.restore(scale.state())
    assert other == LossScale(scale=64.0, good_steps=5, num_skipped=2)


def test_disabled_scale_is_one():
    scale = LossScale(enabled=False)
    scale.update(finite=False)
    assert scale.factor() == 1.0
    assert scale.num_skipped == 0
