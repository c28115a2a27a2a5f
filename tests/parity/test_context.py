"""Context parallelism with recompute matches one process in float64 in each cp_mode: loss, norm, gradients, weights.

tests/parity/test_layouts.py covers every layout, with documents, padding and few key-value heads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.choice import todays
from tests.parity.cases import GPT2
from tests.parity.plans import Cell, Subject, differing, packed
from weft.config.plan import Plan
from weft.verify.parity import DecoderCase


@pytest.mark.parametrize(
    ("mode", "recompute"), todays(itertools.product(["gather", "ring", "ulysses"], ["full", "selective", "60%"]))
)
def test_context_parallel_with_recompute_matches_one_process(mode, recompute, plain, ranks2):
    known = {name: packed()[name] for name in ("packed", "multi-query")}
    plan = Plan.parse(f"cp=2 cp_mode={mode} recompute={recompute} precision=fp64")
    found = differing([Cell(name, plan) for name in known], known, plain, ranks2)
    assert not found, "\n".join(found)


@dataclass(frozen=True)
class MaskPositionsCase(DecoderCase):
    """OPT, which computes positions from its mask, with padding on the left."""

    def model(self) -> nn.Module:
        import transformers

        torch.manual_seed(self.seed)
        config = transformers.OPTConfig(
            vocab_size=self.spec.vocab_size, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=32, dropout=0.0, pad_token_id=1,
        )  # fmt: skip
        return transformers.OPTForCausalLM(config).double()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        batch = super().batch(step)
        mask = torch.ones_like(batch["labels"])
        mask[:3, :5] = 0
        batch["labels"][mask == 0] = -100
        return {"input_ids": batch["input_ids"], "labels": batch["labels"], "mask": mask}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=batch["input_ids"], attention_mask=batch["mask"]).logits


@pytest.mark.parametrize("mode", ["gather", "ring", "ulysses"])
def test_positions_computed_from_a_mask_match_one_process(mode, plain, ranks2):
    known = {"opt": Subject(MaskPositionsCase(GPT2, num_steps=2, global_batch=8), GPT2)}
    plan = Plan.parse(f"cp=2 cp_mode={mode} precision=fp64")
    found = differing([Cell("opt", plan)], known, plain, ranks2)
    assert not found, "\n".join(found)
