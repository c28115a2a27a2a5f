"""Block-scaled int8 codes: bounds of the rounding error, and an unbiased mean of stochastic rounding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.wire.coder import chance_key
from weft.comm.wire.codes import scales_of
from weft.comm.wire.wire_format import find_wire
from weft.config.fields import wire_formats
from weft.config.fields.wire_formats import COMPRESSES, WireSpec
from weft.errors import PlanError

INT8 = find_wire("int8")


def rounded(x_RN: torch.Tensor, key: int) -> torch.Tensor:
    wire = INT8.at(key)
    return wire.decode(wire.encode(x_RN, None)[0], x_RN.shape[1], x_RN.dtype)


def scales(x: torch.Tensor) -> torch.Tensor:
    """Return the scale that applies to each value of a row."""
    blocks = torch.nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 256)
    return scales_of(blocks, 127).to(x.dtype).repeat_interleave(256)[: len(x)]


@given(
    st.integers(1, 2000), st.integers(0, 2**63), st.sampled_from([torch.float32, torch.float64]), st.integers(-30, 30)
)
@settings(max_examples=60, deadline=None)
def test_rounding_error_is_at_most_one_scale_step(numel, key, dtype, magnitude):
    x = (torch.randn(2, numel, generator=torch.Generator().manual_seed(key % 2**32)) * 10.0**magnitude).to(dtype)
    error = (rounded(x, key) - x).abs()
    for row in range(2):
        assert (error[row] <= scales(x[row]) * (1 + 1e-5)).all()


@given(st.lists(st.floats(0, 2.0**127, width=32), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_scale_covers_the_largest_value_within_one_percent(values):
    blocks = torch.tensor(values)[:, None]
    exact, found = blocks[:, 0] / 127, scales_of(blocks, 127).float()
    assert (found >= exact).all()
    assert (found <= exact * (1 + 2.0**-7) + 1e-40).all()


def test_stochastic_rounding_is_unbiased_over_steps():
    """Check that each mean of 4,000 draws is within six standard errors, and that their mean square score is near 1."""
    x, draws = torch.randn(1, 700, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), 4000
    total = torch.zeros_like(x)
    for step in range(draws):
        total += rounded(x, chance_key(step, 0, "blocks.0 shard outer", "summands", 1))
    step_size = scales(x[0])
    fraction = x[0] / step_size - (x[0] / step_size).floor()
    deviation = (fraction * (1 - fraction)).sqrt() * step_size / math.sqrt(draws)
    scores = (total[0] / draws - x[0]) / deviation.clamp(min=1e-9)
    assert scores.abs().max() < 6
    assert 0.7 < scores.square().mean() < 1.3
    # Rounding to nearest would leave a constant error of up to half a step.
    assert ((x[0] / step_size).round() * step_size - x[0]).abs().max() > 20 * (total[0] / draws - x[0]).abs().max()


def test_random_bits_differ_by_row_rank_step_and_slice():
    x = torch.full((2, 1 << 17), 0.3)
    x[:, ::256] = 1.0
    draws = [rounded(x, chance_key(step, 0, "t", "summands", rank)) for step, rank in ((0, 0), (0, 1), (1, 0))]
    draws = [*draws, draws[0].flip(0), torch.cat(draws[0].split(1 << 16, 1)[::-1], 1)]
    for other in draws[1:]:
        equal = (draws[0] == other).float().mean()
        assert (
            0.4 < equal < 0.75
        )  # two of three round in one direction: 5/9 agree by chance, and the block maxima always do
    assert torch.equal(draws[0], rounded(x, chance_key(0, 0, "t", "summands", 0)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_value_affects_only_its_block(value):
    x = torch.ones(1, 1000)
    x[0, 300] = value
    finite = rounded(x, 1).isfinite()[0]
    assert not finite[256:512].any()
    assert finite[:256].all()
    assert finite[512:].all()


def test_zeros_decode_to_zeros():
    assert not rounded(torch.zeros(1, 513), 1).any()


@pytest.mark.parametrize("name", [name for name in COMPRESSES if name != "none"])
def test_registered_formats_declare_their_bytes_and_error_feedback(name):
    """Rules and planner read the WireSpec, collectives the class: both must agree for every registered format."""
    wire = find_wire(name)
    assert not wire.feeds_back or wire.spec.state_bytes > 0
    x_RN = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    if wire.spec.rank:  # low-rank formats send matrices, and encode no single values
        with pytest.raises(NotImplementedError):
            wire.encode(x_RN, None)
        return
    codes, _ = wire.encode(x_RN, None)
    assert codes.numel() == 3 * wire.spec.num_bytes(4096)
    assert wire.decode(codes, 4096, x_RN.dtype).shape == x_RN.shape


def test_feedback_without_state_bytes_is_rejected(monkeypatch):
    spec = WireSpec("forgot", "weft.comm.wire.codes:Int4", element_bytes=0.5, block=64, block_bytes=2.0)
    monkeypatch.setitem(wire_formats._KNOWN, spec.name, spec)
    with pytest.raises(PlanError, match="state_bytes is 0"):
        find_wire("forgot")
