"""Llama 3 405B as Meta trained it on 16,384 H100s (arXiv 2407.21783, table 4), compared with the planner."""

from __future__ import annotations

import pytest

from weft.config.plan import Plan
from weft.planner.report.explanation import band_of
from weft.planner.search.candidate import Candidate, flops_per_token
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated

SHAPE = "pp=16 dp_shard=128 tp=8 sp=on schedule=interleaved microbatches=16 virtual_stages=7"
PLAN = f"{SHAPE} zero=2 precision=bf16 compile=on"
FLOPS = 400e12


def judged(plan: str = PLAN) -> Candidate:
    asked = Question.of("llama3-405b", "2048x8xh100", seq_len=8192, global_batch=2048)
    return estimated([Plan.parse(plan)], asked)[0]


def is_in_band(one: Candidate, causal: bool) -> bool:
    """Return whether the 80% band of the plan's time contains Meta's measurement."""
    job, band = one.question.job, band_of(one)
    measured = flops_per_token(job.shape, 8192, causal=causal) * 2048 * 8192 / (16_384 * FLOPS)
    return band is not None and band.low * one.step_s <= measured <= band.high * one.step_s


def test_time_band_contains_the_measurement() -> None:
    """Count full attention, as most published FLOP/s do. With causal attention the measurement is 10 % below."""
    assert is_in_band(judged(), causal=False)


def test_plan_fits_and_activations_match_a_hand_count() -> None:
    """The first ranks keep all 16 passes of 8 layers before their first chunk of layers computes gradients.

    Bytes that a compiled layer saves per token with sp and tp=8: inputs of the two norms (4 h / 8); q, k, v, the
    attention output and its log-sum-exp; gate and up. Outputs of norms, and the product of gate and up, are recomputed
    (tests/parallel/test_saved_bytes.py compares this count with real blocks).
    """
    one = judged()
    h, ffn, kv, heads, tp = 16_384, 53_248, 1024, 128, 8
    token = (4 * h + 2 * (2 * h + 2 * kv) + 4 * heads + 4 * ffn) / tp
    layer = token * 8192
    assert one.memory["activations"] == pytest.approx(16 * 8 * layer, rel=0.01)
    weights = 2 * (2 * h * h + 2 * h * kv + 3 * h * ffn) * 8 / tp
    assert one.memory["parameters"] == pytest.approx(weights, rel=0.01)
    chunk = 4 / 2 * weights / 7
    shard = 4 / 2 * weights / 128
    assert one.memory["gradients"] == pytest.approx(chunk + shard, rel=0.02)
    assert one.fits > 0.97


def test_without_compile_layers_are_recomputed() -> None:
    """Meta did not recompute; here compiled blocks are required to fit."""
    assert judged(PLAN.replace("compile=on", "compile=off")).fits < 0.9
