"""Uncertainty bands and fit probabilities: wider with less data, and none without data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.cluster import ClusterSpec, devices
from weft.planner.space.columns import Job
from weft.planner.space.shape import Shape
from weft.planner.uncertainty import (
    LEVELS,
    ErrorContext,
    error_context,
    fits_chance,
    generation,
    shipped,
    time_bands,
    unmeasured,
)

KNOWN = ErrorContext(generation="hopper", experts=False, narrow=False, seq_len=4096, nodes=4)


def test_shipped_error_model_is_fitted_on_many_sources():
    known = shipped()
    assert known.sources >= 30
    assert tuple(sorted(known.quantiles)) == LEVELS
    assert all(weight > 0 for weight in known.time.weights.values())  # uncertainty terms only widen


def test_bands_are_nested():
    bands = time_bands(KNOWN)
    lows, highs = [bands[level].low for level in LEVELS], [bands[level].high for level in LEVELS]
    assert lows == sorted(lows, reverse=True)
    assert highs == sorted(highs)
    assert bands[0.8].low < 1 < bands[0.8].high


@given(
    st.sampled_from([name for name, weight in shipped().time.weights.items() if weight]),
    st.sampled_from(LEVELS),
)
def test_each_uncertainty_term_widens_a_band(name, level):
    doubtful = {
        "experts": replace(KNOWN, experts=True),
        "narrow": replace(KNOWN, narrow=True),
        "newer": replace(KNOWN, generation="blackwell"),
        "long": replace(KNOWN, seq_len=2**17),
    }[name]
    wide, near = time_bands(doubtful)[level], time_bands(KNOWN)[level]
    assert wide.high / wide.low > near.high / near.low


@given(st.lists(st.floats(-3, 3), min_size=2, max_size=8), st.floats(0.02, 0.3))
def test_more_free_memory_never_lowers_the_fit_probability(rooms, spread):
    chances = fits_chance(np.sort(rooms), spread)
    assert (np.diff(chances) >= -1e-12).all()
    assert fits_chance(np.zeros(1), spread)[0] == pytest.approx(0.5)


def test_plan_fits_with_certainty_only_with_a_large_margin():
    """Some estimates are far off: a tenth of the memory free is not certain, half of it is."""
    assert fits_chance(np.log([1.1]), shipped().memory.spread)[0] < 0.985
    assert fits_chance(np.log([2.0]), shipped().memory.spread)[0] > 0.99


def test_device_generation_by_name():
    found = {name: generation(name) for name in devices()}
    assert (found["a800"], found["gh200"], found["gb300"], found["mi355x"]) == ("ampere", "hopper", "blackwell", "cdna")
    assert found["rtx4090"] == found["l40s"] == found["ascend-910b"] == ""
    assert generation("h100*") == "hopper"


def test_unmeasured_conditions_are_listed():
    assert unmeasured(KNOWN, "h100") == ()
    assert unmeasured(replace(KNOWN, generation=""), "rtx4090*") == ("no run on rtx4090 or its kind",)
    assert unmeasured(replace(KNOWN, generation="ampere", experts=True), "a100") == (
        "no run with experts on this device",
    )
    assert unmeasured(replace(KNOWN, decoder=False), "h100") == ("no model but decoders of text",)
    assert unmeasured(replace(KNOWN, adapter=True), "h100") == ("no run with an adapter",)
    assert unmeasured(replace(KNOWN, seq_len=2**20), "h100") == ("no sequence beyond 262,144 tokens",)


def test_uncertainty_terms_of_a_job():
    shape = Shape(vocab=1000, hidden=64, layers=2, heads=2, kv_heads=2, head_dim=32, ffn=128, gated=True)
    job = Job(shape=shape, seq_len=32_768, global_batch=8)
    one = error_context(job, ClusterSpec.parse("4x8xb200"), "fp8", 32)
    assert (one.generation, one.narrow, one.experts, one.nodes) == ("blackwell", True, False, 4)
    assert one.uncertainty_terms["long"] == 2.0
