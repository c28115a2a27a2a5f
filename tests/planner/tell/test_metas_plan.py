"""Llama 3 405B as Meta trained it on 16,384 H100s (arXiv 2407.21783, table 4): what the planner says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.planner.search import Candidate, Question
from weft.planner.search.figures import flops_per_token
from weft.planner.search.moves import estimated
from weft.planner.tell.basis import band_of
from weft.spec.plan import Plan

SHAPE = "pp=16 dp_shard=128 tp=8 sp=on schedule=interleaved microbatches=16 virtual_stages=7"
PLAN = f"{SHAPE} zero=2 precision=bf16 compile=on"
FLOPS = 400e12


def judged(**features: bool) -> Candidate:
    """Meta's plan, by software with these features beside Weft's."""
    asked = Question.of("llama3-405b", "2048x8xh100", seq_len=8192, global_batch=2048)
    asked = replace(asked, job=replace(asked.job, stack=replace(asked.job.stack, **features)))
    return estimated([Plan.parse(PLAN)], asked)[0]


@pytest.mark.parametrize("causal", [True, False])
def test_its_time_lies_in_the_band(causal: bool) -> None:
    """However attention was counted in the FLOP/s that they tell of."""
    one = judged()
    job, band = one.question.job, band_of(one)
    measured = flops_per_token(job.shape, 8192, causal=causal) * 2048 * 8192 / (16_384 * FLOPS)
    assert band is not None
    assert band.low * one.step_s <= measured <= band.high * one.step_s


def test_what_lies_in_tensors_fits_where_gradients_are_shared_out_after_each_pass() -> None:
    """Weft's stay whole until the end of the step, 12 GiB of them; `docs/concepts/estimates.md` says what is open."""
    weft, meta = judged(), judged(travel_once=False)
    assert weft.total_bytes - weft.memory["reserve"] > weft.usable_bytes
    assert meta.total_bytes - meta.memory["reserve"] < meta.usable_bytes
    assert weft.memory["gradients"] - meta.memory["gradients"] == pytest.approx(11.8 * 2**30, rel=0.02)
