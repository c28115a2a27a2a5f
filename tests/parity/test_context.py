"""Context parallel equals one process: loss, norm, gradients and weights, in float64, each of the three ways."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.parity.cases import GPT2, LLAMA, HuggingFaceCase, train_cases
from weft.spec.model import DecoderSpec
from weft.testing import Case, DecoderCase

RTOL = 1e-10
MODES = ("gather", "ring", "ulysses")
#: As many heads as four ranks of Ulysses need; two key-value heads, so that under cp=4 each goes to two ranks.
WIDE_GPT2 = dataclasses.replace(GPT2, num_heads=4, num_kv_heads=4)
MULTI_QUERY = DecoderSpec(
    vocab_size=61, dim=16, num_layers=2, num_heads=4, num_kv_heads=1, ffn_dim=24, max_seq_len=32, tied=False
)


@dataclass(frozen=True)
class PackedCase(HuggingFaceCase):
    """A decoder of transformers, with documents that only positions show, or with padding that a mask shows."""

    padded: bool = False

    def model(self) -> nn.Module:
        import transformers

        if self.kind == "qwen2":
            return super().model()
        torch.manual_seed(self.seed)
        if self.kind == "gpt2":
            config = transformers.GPT2Config(
                vocab_size=61, n_embd=16, n_layer=2, n_head=4, n_positions=32,
                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            )  # fmt: skip
            return transformers.GPT2LMHeadModel(config).double()
        config = transformers.LlamaConfig(
            vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=24, max_position_embeddings=32, tie_word_embeddings=True,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).double()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        batch = super().batch(step)
        if self.padded:
            batch["mask"] = torch.ones_like(batch["labels"])
            batch["mask"][:3, :5] = 0
            batch["mask"][1, -2:] = 0
            batch["labels"][batch["mask"] == 0] = -100
        return batch

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {"position_ids": batch["positions"]}
        if self.padded:
            inputs["attention_mask"] = batch["mask"]
        # A model that fills a cache does not see documents in positions, here as there.
        return model(input_ids=batch["input_ids"], use_cache=not self.documents, **inputs).logits


def decoders() -> dict[str, Case]:
    return {
        "llama": DecoderCase(LLAMA, num_steps=3),
        "llama-documents": DecoderCase(LLAMA, num_steps=3, documents=True),
        "gpt2-documents": DecoderCase(WIDE_GPT2, num_steps=2, documents=True),
        "gpt2": DecoderCase(WIDE_GPT2, num_steps=2, optimizer="sgd", max_grad_norm=0.0),
        "multi-query": DecoderCase(MULTI_QUERY, num_steps=2, masked=0.0),
    }


def hugging_face() -> dict[str, Case]:
    return {
        f"{kind}{'-documents' * documents}{'-padded' * padded}": PackedCase(
            LLAMA, num_steps=2, kind=kind, documents=documents, padded=padded
        )
        for kind in ("llama", "qwen2", "gpt2")
        for documents, padded in ((False, False), (True, False), (False, True))
    }


#: Every stage of ZeRO with every way where shards are those of cp alone; with other axes, each way and each stage.
TWO = [f"cp=2 cp_mode={mode} zero={zero}" for mode in MODES for zero in range(4)]
FOUR = [
    *(f"cp=4 cp_mode={mode} zero={zero}" for mode in MODES for zero in (0, 3)),
    *(f"dp_shard=2 cp=2 cp_mode={mode} zero={zero}" for mode, zero in zip(MODES, (1, 2, 3), strict=True)),
    *(f"dp_replicate=2 cp=2 cp_mode={mode} zero={zero}" for mode, zero in zip(MODES, (3, 0, 2), strict=True)),
]


@pytest.fixture(scope="module")
def references():
    return {
        "decoders": train_cases("precision=fp64", decoders()),
        "hugging_face": train_cases("precision=fp64", hugging_face()),
    }


def compare(pool, plan, chosen, references):
    for result in pool.run(train_cases, plan, chosen):
        for name, numbers in result.items():
            assert numbers.largest_difference(references[name]) < RTOL, name


@pytest.mark.parametrize("plan", TWO)
def test_decoders_on_two_ranks(plan, references, ranks2):
    for accumulation in (1, 2):
        compare(ranks2, f"{plan} accumulation={accumulation} precision=fp64", decoders(), references["decoders"])


@pytest.mark.parametrize("plan", FOUR)
def test_decoders_on_four_ranks(plan, references, ranks4):
    compare(ranks4, f"{plan} accumulation=2 precision=fp64", decoders(), references["decoders"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("zero", [0, 3])
def test_hugging_face_on_two_ranks(zero, mode, references, ranks2):
    plan = f"cp=2 cp_mode={mode} zero={zero} precision=fp64"
    compare(ranks2, plan, hugging_face(), references["hugging_face"])


@pytest.mark.parametrize("mode", MODES)
def test_hugging_face_on_four_ranks(mode, references, ranks4):
    plan = f"dp_shard=2 cp=2 zero=2 accumulation=2 cp_mode={mode} precision=fp64"
    compare(ranks4, plan, hugging_face(), references["hugging_face"])


@pytest.mark.parametrize("recompute", ["full", "attention", "selective", "60%"])
@pytest.mark.parametrize("mode", MODES)
def test_recompute(mode, recompute, references, ranks2):
    chosen = {name: case for name, case in decoders().items() if "llama" in name}
    compare(ranks2, f"cp=2 cp_mode={mode} recompute={recompute} precision=fp64", chosen, references["decoders"])
