"""Context parallel with recompute equals one process: loss, norm, gradients and weights, in float64, in three ways.

Every layout, with documents, padding and few key-value heads: tests/parity/test_layouts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.parity.cases import GPT2
from tests.parity.plans import Cell, Subject, differing, packed
from weft.config.plan import Plan
from weft.verify.parity import DecoderCase


@pytest.mark.parametrize("recompute", ["full", "selective", "60%"])
@pytest.mark.parametrize("mode", ["gather", "ring", "ulysses"])
def test_recompute(mode, recompute, plain, ranks2):
    known = {name: packed()[name] for name in ("packed", "multi-query")}
    plan = Plan.parse(f"cp=2 cp_mode={mode} recompute={recompute} precision=fp64")
    found = differing([Cell(name, plan) for name in known], known, plain, ranks2)
    assert not found, "\n".join(found)


@dataclass(frozen=True)
class CountingCase(DecoderCase):
    """OPT, which counts positions by the tokens that its mask shows; padding is on the left."""

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
def test_positions_that_are_counted_by_a_mask(mode, plain, ranks2):
    known = {"opt": Subject(CountingCase(GPT2, num_steps=2, global_batch=8), GPT2)}
    plan = Plan.parse(f"cp=2 cp_mode={mode} precision=fp64")
    found = differing([Cell("opt", plan)], known, plain, ranks2)
    assert not found, "\n".join(found)
