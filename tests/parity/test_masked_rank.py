"""A rank whose tokens are all masked: of samples, of a part of each sequence, of a stage's microbatch.

Its loss is a sum of nothing. A mean would be no number there, and a mean of means would weigh the other ranks wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.parity.cases import LLAMA
from tests.parity.moe_cases import MOE, MoECase
from weft.train.tasks.decoder_loss import IGNORE
from weft.verify.parity import Case, DecoderCase, train_cases


@dataclass(frozen=True)
class MaskedRank(DecoderCase):
    """Trained tokens are in the first half of the samples, and there in the first and the last quarter of the tokens.

    So a second rank has none where two divide the samples, and none where two divide the sequence as ring and gather
    do: the first has its first and last quarter, the second what is between.
    """

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return masked(super().batch(step))


@dataclass(frozen=True)
class MaskedRankMoE(MoECase):
    """The same with experts: tokens that nobody trains on still travel to them, and are balanced."""

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return masked(super().batch(step))


def masked(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    samples, tokens = batch["labels"].shape
    batch["labels"][samples // 2 :] = IGNORE
    batch["labels"][:, tokens // 4 : 3 * tokens // 4] = IGNORE
    return batch


CASES: dict[str, Case] = {
    "decoder": MaskedRank(LLAMA, num_steps=2),
    "moe": MaskedRankMoE(MOE, num_steps=2),
}
PLANS = [
    "dp_replicate=2",
    "dp_shard=2 zero=2 accumulation=2",
    "dp_shard=2 zero=3",
    "cp=2 cp_mode=ring zero=1",
    "cp=2 cp_mode=gather zero=3",
    "tp=2 sp=on",
    "pp=2 microbatches=2",
]


@pytest.fixture(scope="module")
def references():
    return train_cases("precision=fp64", CASES)


@pytest.mark.parametrize("plan", [*PLANS, "dp_shard=2 ep=2 zero=1", "cp=2 ep=2 cp_mode=ring"])
def test_a_rank_without_a_trained_token(plan, references, ranks2):
    chosen = {name: case for name, case in CASES.items() if name == "moe" or "ep=" not in plan}
    for results in ranks2.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in results.items():
            assert all(loss == loss and loss > 0 for loss in result.losses)
            assert result.largest_difference(references[name]) < 1e-10, name
