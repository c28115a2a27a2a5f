"""Hugging Face families, each as a random model of a few thousand parameters.

Plans come from the rules, so a new axis needs no change here. `without` lists the axes that a family does not support,
with the reason next to it.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.train.tasks.decoder_loss import IGNORE, token_cross_entropy
from weft.verify.verifier import Float64Throughout

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, FFN, LENGTH = 61, 16, 2, 4, 2, 24, 32

_SIZES = {
    "vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": FFN, "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
_GROUPED = {**_SIZES, "num_key_value_heads": KV_HEADS}
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}

#: The five tokens of an image cannot be divided by two.
FIVE_TOKENS = frozenset({"cp", "sp"})


@dataclass(frozen=True)
class Family:
    """How to build one family's model. model, config: names in transformers. without: axes that it does not support."""

    model: str
    config: str
    settings: dict[str, Any]
    kv_heads: int = KV_HEADS
    without: frozenset[str] = frozenset()
    kind: str = "tokens"  # or "images"


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", {**_GROUPED, "tie_word_embeddings": False}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, "head_dim": 8, "tie_word_embeddings": True}),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_GROUPED, "sliding_window": 6}),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, "head_dim": 8}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        # Layers with a window alternate with layers without. Scores are capped at 2, which they reach here.
        {**_GROUPED, "head_dim": 8, "sliding_window": 3, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": DIM,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": LENGTH,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        kv_heads=HEADS,
    ),
    "gpt-neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_SIZES, **_NO_DROPOUT}, kv_heads=HEADS),
    "phi": Family(
        "PhiForCausalLM", "PhiConfig", {**_GROUPED, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "MixtralConfig",
        # transformers' default grouped matrix product does not support float64.
        {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        # Latent attention without experts: replicated layers, and one key for all heads, precede sharded layers.
        {
            **_SIZES,
            "num_key_value_heads": HEADS,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 2,
            "qk_nope_head_dim": 4,
            "v_head_dim": 3,
            "first_k_dense_replace": LAYERS,
        },
        kv_heads=HEADS,
    ),
    # Norms reduce over the queries of all heads, and over the keys.
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", {**_GROUPED, "tie_word_embeddings": False}),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        # One sink per head. Layers with a window alternate with layers without.
        {
            **_GROUPED,
            "head_dim": 4,
            "sliding_window": 3,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "experts_implementation": "eager",
            "attn_implementation": "eager",
        },
    ),
    "bert": Family(
        "BertForMaskedLM",
        "BertConfig",
        {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        kv_heads=HEADS,
    ),
    "roberta": Family(
        "RobertaForMaskedLM",
        "RobertaConfig",
        # The pad token occurs among the tokens: positions start after its id and skip it.
        {**_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 5},
        kv_heads=HEADS,
    ),
    "vit": Family(
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": DIM,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": FFN,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "image_size": 8,
            "patch_size": 4,
            "num_channels": 3,
            "num_labels": 5,
        },
        kv_heads=HEADS,
        without=FIVE_TOKENS,
        kind="images",
    ),
}


@dataclass(frozen=True)
class FamilyCase:
    """One family's model on random tokens or images, in float64. Weights start large, so that errors are visible."""

    name: str
    num_steps: int = 1
    global_batch: int = 8
    seq_len: int = 8
    max_grad_norm: float = 0.5

    @property
    def family(self) -> Family:
        return FAMILIES[self.name]

    def model(self) -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, self.family.config)(**self.family.settings)
        torch.manual_seed(11)
        model = getattr(transformers, self.family.model)(config).double()
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "bias" in name:
                    param.normal_(std=0.1)
                elif param.ndim > 1:
                    param.mul_(5.0)
        return model

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 + step)
        if self.family.kind == "images":
            images = torch.randn(self.global_batch, 3, 8, 8, generator=generator, dtype=torch.float64)
            return {"pixel_values": images, "labels": torch.randint(5, (self.global_batch,), generator=generator)}
        shape = (self.global_batch, self.seq_len)
        ids, labels = (torch.randint(1, VOCAB, shape, generator=generator) for _ in range(2))
        labels[:, : 1 + step % 3] = IGNORE
        labels[-1] = IGNORE
        return {"input_ids": ids, "labels": labels}

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        if self.family.model.endswith("CausalLM") or self.name == "gpt2":
            inputs["use_cache"] = False
        # Gemma's norm sums its weight's gradient in float32, whose result depends on the split of the batch.
        with Float64Throughout():
            return model(**inputs).logits

    def loss(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | int]:
        if self.family.kind == "images":
            return F.cross_entropy(output, batch["labels"], reduction="sum"), len(output)
        return token_cross_entropy(output, batch)


def shape_of(family: Family) -> DecoderSpec:
    """Return the heads, widths and layers of a family for the rules."""
    return DecoderSpec(
        vocab_size=VOCAB, dim=DIM, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=family.kv_heads,
        ffn_dim=4 * DIM if family.model.startswith("GPT2") else FFN, max_seq_len=LENGTH,
    )  # fmt: skip
