"""Llama 3 405B as Meta trained it on 16,384 H100s (arXiv 2407.21783, table 4): what the planner says of it."""

from __future__ import annotations

import pytest

from weft.planner.search import Candidate, Question
from weft.planner.search.figures import flops_per_token
from weft.planner.search.moves import estimated
from weft.planner.tell.basis import band_of
from weft.spec.plan import Plan

SHAPE = "pp=16 dp_shard=128 tp=8 sp=on schedule=interleaved microbatches=16 virtual_stages=7"
PLAN = f"{SHAPE} zero=2 precision=bf16 compile=on"
FLOPS = 400e12


def judged(**changes: str) -> Candidate:
    """Meta's plan, with these fields changed."""
    asked = Question.of("llama3-405b", "2048x8xh100", seq_len=8192, global_batch=2048)
    return estimated([Plan.parse(" ".join([PLAN, *(f"{name}={value}" for name, value in changes.items())]))], asked)[0]


def lies_in_the_band(one: Candidate, causal: bool) -> bool:
    """Whether the 80% band of its time holds what Meta measured."""
    job, band = one.question.job, band_of(one)
    measured = flops_per_token(job.shape, 8192, causal=causal) * 2048 * 8192 / (16_384 * FLOPS)
    return band is not None and band.low * one.step_s <= measured <= band.high * one.step_s


@pytest.mark.parametrize("causal", [True, False])
def test_its_time_lies_in_the_band(causal: bool) -> None:
    """However attention was counted in the FLOP/s that they tell of."""
    assert lies_in_the_band(judged(), causal)


def test_what_lies_in_tensors_fits_and_a_hand_count_agrees() -> None:
    """All 16 passes wait on the first ranks, of 8 layers each, before the first chunk of layers makes gradients.

    What a layer keeps of a token under sp and tp=8, in bytes (Korthikanti et al. 2022, arXiv 2205.05198, section 4, for
    a gated layer without dropout): 8 h / 8 of inputs of norms and products; q, k, v, the output and its log-sum-exp;
    gate, up and their product.
    """
    one = judged()
    h, ffn, kv, heads, tp = 16_384, 53_248, 1024, 128, 8
    token = (8 * h + 2 * (2 * h + 2 * kv) + 4 * heads + 6 * ffn) / tp
    layer = token * 8192
    assert one.memory["activations"] == pytest.approx(16 * 8 * layer, rel=0.01)
    weights = 2 * (2 * h * h + 2 * h * kv + 3 * h * ffn) * 8 / tp
    assert one.memory["parameters"] == pytest.approx(weights, rel=0.01)
    chunk = 4 / 2 * weights / 7
    shard = 4 / 2 * weights / 128
    assert one.memory["gradients"] == pytest.approx(chunk + shard, rel=0.02)
    assert one.total_bytes - one.memory["reserve"] < one.usable_bytes


def test_with_what_an_allocator_keeps_three_of_eight_layers_are_recomputed() -> None:
    """Meta recomputed none, so its allocator kept less beside its tensors than in the runs that the reserve is from."""
    assert judged().fits < 0.9
    two, three = judged(recompute="full:2"), judged(recompute="full:3")
    assert two.fits < 0.9 <= three.fits
    assert three.step_s < 1.06 * judged().step_s
