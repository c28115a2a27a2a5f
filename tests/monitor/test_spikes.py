"""Loss spikes on synthetic curves: reported once, and never on a curve that is only noisy."""

from __future__ import annotations

import math
import random

import pytest

from weft.monitor.guards import WINDOW, SpikeWatch


def spike_steps(losses: list[float]) -> list[int]:
    """Return the steps (from 1) at which a spike is reported."""
    watch = SpikeWatch()
    return [step for step, loss in enumerate(losses, start=1) if watch.observe(loss) is not None]


def falling(num_steps: int, noise: float, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [2.0 + 6.0 * math.exp(-step / 60) + chance.gauss(0, noise) for step in range(num_steps)]


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_falling_or_noisy_curves_have_no_spike(noise: float, seed: int) -> None:
    assert spike_steps(falling(2000, noise, seed)) == []


def test_slowly_rising_or_constant_loss_has_no_spike() -> None:
    assert spike_steps([2.0] * 500) == []
    assert spike_steps([2.0 + step / 1000 for step in range(1500)]) == []
    assert spike_steps([9.0, 8.5, 30.0, 8.0, 7.5]) == []  # too few steps to know the usual level


def test_heavy_tails_are_rarely_reported() -> None:
    chance = random.Random(1)
    assert len(spike_steps([chance.lognormvariate(0, 0.4) for _ in range(3000)])) <= 6


def test_jump_is_reported_immediately_and_once() -> None:
    curve = falling(300, 0.05)
    curve[200:230] = [181.0 - step for step in range(30)]
    assert spike_steps(curve) == [201]


def test_two_jumps_are_reported_twice() -> None:
    curve = falling(400, 0.05)
    curve[200:203] = [9.0] * 3
    curve[350:353] = [9.0] * 3
    assert spike_steps(curve) == [201, 351]


def test_smaller_jump_is_reported_when_it_lasts() -> None:
    # A single step was as high before. Another single one is not reported; a second in a row is.
    curve = [2.0 + 0.01 * (step % 7) for step in range(160)]
    curve[80] = 6.0
    curve[130:140] = [7.0] * 10
    assert spike_steps(curve) == [81, 132]


def test_new_level_is_reported_once() -> None:
    assert spike_steps(
        [2.0 + 0.01 * (step % 7) for step in range(200)] + [6.0 + 0.01 * (step % 7) for step in range(600)]
    ) == [201]


def test_non_finite_losses_are_left_to_the_guard() -> None:
    assert spike_steps([2.0] * WINDOW + [math.nan, math.inf] + [2.0] * 10) == []


def test_noise_around_a_converged_loss_is_no_spike() -> None:
    chance = random.Random(0)
    falls = [6.8 * math.exp(-step / 20) for step in range(400)]
    converged = [2e-8 * math.exp(chance.gauss(0, 1.5)) for _ in range(2000)]
    assert spike_steps(falls + converged) == []


def test_self_ending_spikes_are_reported_ever_more_rarely() -> None:
    chance = random.Random(0)
    assert len(spike_steps([2e-8 * math.exp(chance.gauss(0, 1.5)) for _ in range(4000)])) <= 8


def test_lasting_spike_is_reported_within_the_quiet_steps() -> None:
    curve = falling(400, 0.05)
    curve[200:203] = [9.0] * 3
    curve[215:300] = [9.0] * 85
    assert spike_steps(curve) == [201, 235]
