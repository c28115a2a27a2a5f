"""Codes with a scale for each block: bounds of what is rounded off, and that rounding by chance has the right mean."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.wire.coder import chance_key
from weft.comm.wire.codes import scales_of
from weft.comm.wire.wire_format import find_wire

INT8 = find_wire("int8")


def rounded(x_RN: torch.Tensor, key: int) -> torch.Tensor:
    wire = INT8.at(key)
    return wire.decode(wire.encode(x_RN, None)[0], x_RN.shape[1], x_RN.dtype)


def scales(x: torch.Tensor) -> torch.Tensor:
    """The scale of each value of a row."""
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 256)
    return scales_of(blocks, 127).to(x.dtype).repeat_interleave(256)[: len(x)]


@given(
    st.integers(1, 2000), st.integers(0, 2**63), st.sampled_from([torch.float32, torch.float64]), st.integers(-30, 30)
)
@settings(max_examples=60, deadline=None)
def test_no_value_is_off_by_more_than_its_scale(numel, key, dtype, magnitude):
    x = (torch.randn(2, numel, generator=torch.Generator().manual_seed(key % 2**32)) * 10.0**magnitude).to(dtype)
    error = (rounded(x, key) - x).abs()
    for row in range(2):
        assert (error[row] <= scales(x[row]) * (1 + 1e-5)).all()


@given(st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_scale_is_not_below_what_it_must_hold_and_little_above(values):
    blocks = torch.tensor(values)[:, None]
    exact, found = blocks[:, 0] / 127, scales_of(blocks, 127).float()
    assert (found >= exact).all()
    assert (found <= exact * (1 + 2.0**-7) + 1e-40).all()


def test_the_mean_over_steps_is_the_value():
    """Of 4000 draws: each mean lies within six standard errors, and all together no farther than they should."""
    x, draws = torch.randn(1, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), 4000
    total = torch.zeros_like(x)
    for step in range(draws):
        total += rounded(x, chance_key(step, 0, "blocks.0 shard outer", "summands", 1))
    step_size = scales(x[0])
    place = x[0] / step_size - (x[0] / step_size).floor()
    deviation = (place * (1 - place)).sqrt() * step_size / math.sqrt(draws)
    scores = (total[0] / draws - x[0]) / deviation.clamp(min=1e-9)
    assert scores.abs().max() < 6
    assert 0.7 < scores.square().mean() < 1.3
    # To the nearest, it would be off by up to half a step for ever.
    assert ((x[0] / step_size).round() * step_size - x[0]).abs().max() > 20 * (total[0] / draws - x[0]).abs().max()


def test_rows_ranks_steps_and_stretches_draw_differently():
    x = torch.full((2, 1 << 17), 0.3)
    x[:, ::256] = 1.0
    draws = [rounded(x, chance_key(step, 0, "t", "summands", place)) for step, place in ((0, 0), (0, 1), (1, 0))]
    draws = [*draws, draws[0].flip(0), torch.cat(draws[0].split(1 << 16, 1)[::-1], 1)]
    for other in draws[1:]:
        equal = (draws[0] == other).float().mean()
        assert 0.4 < equal < 0.75  # two of three go one way: 5/9 agree by chance, and the largest always do
    assert torch.equal(draws[0], rounded(x, chance_key(0, 0, "t", "summands", 0)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_spoils_its_block_alone(value):
    x = torch.ones(1, 1000)
    x[0, 300] = value
    finite = rounded(x, 1).isfinite()[0]
    assert not finite[256:512].any()
    assert finite[:256].all()
    assert finite[512:].all()


def test_nothing_comes_of_zeros():
    assert not rounded(torch.zeros(1, 513), 1).any()
