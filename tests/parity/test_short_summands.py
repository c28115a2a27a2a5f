"""On one host a backend sends bf16 and fp16 gradients unconverted: half the bytes, and the bits of fp32 sums."""

from __future__ import annotations

import pytest
import torch

from tests.parity.cases import LLAMA
from weft.comm import connect
from weft.parallel.zero_flat.model import FlatModel
from weft.verify.parity import DecoderCase, ParityResult, train_case

CASE = DecoderCase(LLAMA, num_steps=3)
#: Plan -> whether gradients take half the bytes, which they do not if several passes are summed first. Gradients of
#: norms and of the head are fp32, which only zero=3 rounds.
PLANS = {
    "dp_shard=2 zero=1 precision=bf16": True,
    "dp_shard=2 zero=2 precision=bf16": True,
    "dp_shard=2 zero=3 precision=bf16": True,
    "dp_shard=2 zero=3 precision=fp16": True,
    "dp_shard=2 zero=3 precision=bf16 accumulation=2": True,
    "dp_shard=2 zero=3 precision=bf16 recompute=full": True,
    "dp_shard=2 zero=3 reshard=after_step precision=bf16 accumulation=2": False,
    "dp_shard=2 zero=1 precision=bf16 accumulation=2": False,
    "dp_shard=2 zero=3": False,
}


def train_all(transport: str | None) -> dict[str, ParityResult]:
    """Train the plans over `transport`, which CPU ranks do not choose by default, with one parameter per bucket."""
    join = connect._join
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connect, "_join", lambda axis, group, device, _: join(axis, group, device, transport))
        patch.setattr(FlatModel, "usual_bucket_bytes", staticmethod(lambda device: 64))
        return {plan: train_case(plan, CASE) for plan in PLANS}


def test_short_summands_train_bitwise_as_fp32_sums(ranks2):
    expected, byte_ratios = ranks2.run(train_all, None), {}
    for answer, reference in zip(ranks2.run(train_all, "backend"), expected, strict=True):
        for plan in PLANS:
            assert answer[plan].losses == reference[plan].losses
            for name, grad in answer[plan].grads.items():
                assert torch.equal(grad, reference[plan].grads[name]), (plan, name)
            byte_ratios[plan] = reference[plan].reduced_bytes / answer[plan].reduced_bytes
    assert {plan: ratio > 1.2 for plan, ratio in byte_ratios.items()} == PLANS, byte_ratios
