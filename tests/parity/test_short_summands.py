"""On one host a backend sends gradients in bf16 and fp16 as they are: half the bytes, and the bits of sums in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.parity.cases import LLAMA
from weft.comm import connect as meet
from weft.parallel.zero_flat.model import FlatModel
from weft.verify.parity import DecoderCase, ParityResult, train_case

CASE = DecoderCase(LLAMA, num_steps=3)
#: And whether gradients travel in half the bytes: not where several passes add up before they do. Those of norms and
#: of the head are in fp32 by themselves, which zero=3 rounds and the others do not.
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
    """The plans, over a transport that ranks of CPUs do not choose, each parameter in a bucket of its own."""
    meeting = meet._join
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meet, "_join", lambda axis, group, device, _: meeting(axis, group, device, transport))
        patch.setattr(FlatModel, "usual_bucket_bytes", staticmethod(lambda device: 64))
        return {plan: train_case(plan, CASE) for plan in PLANS}


def test_training_has_the_bits_of_sums_in_fp32(ranks2):
    expected, seen = ranks2.run(train_all, None), {}
    for answer, reference in zip(ranks2.run(train_all, "backend"), expected, strict=True):
        for plan in PLANS:
            assert answer[plan].losses == reference[plan].losses
            for name, grad in answer[plan].grads.items():
                assert torch.equal(grad, reference[plan].grads[name]), (plan, name)
            seen[plan] = reference[plan].reduced_bytes / answer[plan].reduced_bytes
    assert {plan: ratio > 1.2 for plan, ratio in seen.items()} == PLANS, seen
