"""Ranks whose tokens are all masked: their samples, their shard of each sequence, or a stage's microbatch.

Such a rank's loss is an empty sum. A mean would be NaN, and a mean of means would weight the other ranks wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.choice import todays
from tests.parity.cases import LLAMA
from tests.parity.moe_cases import MOE, MoECase
from weft.train.tasks.decoder_loss import IGNORE
from weft.verify.parity import Case, DecoderCase, train_cases


@dataclass(frozen=True)
class MaskedRank(DecoderCase):
    """Labels are in the first half of the samples only, in the first and last quarter of the tokens.

    So the second of two ranks has no label if they divide the samples, or the sequence as ring and gather do: there the
    first rank has the first and last quarter of the tokens.
    """

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return masked(super().batch(step))


@dataclass(frozen=True)
class MaskedRankMoE(MoECase):
    """The same with experts, to which masked tokens are still routed, and balanced."""

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


@pytest.mark.parametrize("plan", todays([*PLANS, "dp_shard=2 ep=2 zero=1", "cp=2 ep=2 cp_mode=ring"]))
def test_rank_without_labels_matches_one_process(plan, references, ranks2):
    chosen = {name: case for name, case in CASES.items() if name == "moe" or "ep=" not in plan}
    for results in ranks2.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in results.items():
            assert all(loss == loss and loss > 0 for loss in result.losses)
            assert result.largest_difference(references[name]) < 1e-10, name
