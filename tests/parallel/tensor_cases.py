"""Models for tensor parallelism, and comparison of their forward and backward with one process.

Gradients are joined from the ranks' shards by the placements, without a data-parallel engine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.state.placement import WHOLE
from weft.parallel.tensor.apply import shard_tensors
from weft.parallel.tensor.language_head import expect_labels
from weft.train.tasks.decoder_loss import token_cross_entropy

VOCAB, DIM, TOKENS = 61, 16, 8

LLAMA = DecoderSpec(
    vocab_size=VOCAB, dim=DIM, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=32, tied=True
)
GPT2 = replace(LLAMA, family="gpt2", num_kv_heads=4, ffn_dim=64, tied=False)


def hugging_face(name: str, **changes: Any) -> nn.Module:
    """Return a tiny random float64 model of a transformers family, with eager attention."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(3)
    config_class, model_class, own = FAMILIES[name]
    config = getattr(transformers, config_class)(**{**sizes, **own, **changes})
    model = getattr(transformers, model_class)(config).double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):  # transformers' norms compute in float32
            module.forward = functools.partial(_norm_in_float64, module)
    with torch.no_grad():
        for param in model.parameters():  # biases and norms at 0 or 1 would hide errors
            param += 0.05 * torch.randn_like(param)
    return model


def _norm_in_float64(module: Any, x: torch.Tensor) -> torch.Tensor:
    gemma = type(module).__name__.startswith("Gemma")
    eps = module.eps if gemma else module.variance_epsilon
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (gemma + module.weight)


_KV = {"num_key_value_heads": 2}
_NO_DROP = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _KV),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_KV, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_KV, "head_dim": 4}),
    "mistral": ("MistralConfig", "MistralForCausalLM", _KV),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"num_key_value_heads": 1, "head_dim": 8}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "phi": ("PhiConfig", "PhiForCausalLM", _KV),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"num_key_value_heads": 4}),
    "glm": ("GlmConfig", "GlmForCausalLM", {**_KV, "head_dim": 4}),  # rotates neighboring features
    "deepseek_v3": (  # latent attention: replicated layers precede sharded ones, and heads share a key
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 2,
            "qk_nope_head_dim": 4,
            "v_head_dim": 3,
            "first_k_dense_replace": 2,
        },
    ),
    "gpt_oss": (  # a sink per head, which is sharded with the heads
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_KV,
            "head_dim": 4,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "experts_implementation": "eager",
            "attn_implementation": "eager",
            "sliding_window": 4,
        },
    ),
    "bloom": (  # replicated attention, since it reads biases of all heads
        "BloomConfig",
        "BloomForCausalLM",
        {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "bert": ("BertConfig", "BertForMaskedLM", _NO_DROP),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {**_NO_DROP, "image_size": 8, "patch_size": 4, "num_channels": 3, "num_labels": 5},
    ),
}


def build(name: str, **changes: Any) -> nn.Module:
    """Return a model by name: "decoder", "decoder-gpt2" or a transformers family."""
    if name.startswith("decoder"):
        spec = replace(GPT2 if name == "decoder-gpt2" else LLAMA, **changes)
        return build_decoder(spec, dtype=torch.float64, seed=1)
    return hugging_face(name, **changes)


def batch_for(name: str) -> dict[str, torch.Tensor]:
    """Return two samples with a third of the labels masked."""
    generator = torch.Generator().manual_seed(5)
    if name == "vit":
        images = torch.randn(2, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(5, (2,), generator=generator)}
    ids = torch.randint(VOCAB, (2, TOKENS), generator=generator)
    labels = torch.randint(VOCAB, (2, TOKENS), generator=generator)
    labels[:, ::3] = -100
    return {"input_ids": ids, "labels": labels}


def run(model: nn.Module, name: str, batch: dict[str, torch.Tensor], fused: bool) -> torch.Tensor:
    """Return the loss of one forward."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    loss_fn = token_cross_entropy if fused else _own_loss
    with expect_labels(model, loss_fn, batch):
        output = model(*inputs.values()) if name.startswith("decoder") else model(**inputs).logits
    return loss_fn(output, batch)[0]


def _own_loss(logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Compute a loss that needs full logits."""
    labels = batch["labels"].flatten()
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels, reduction="sum"), len(labels)


def differences(
    plan_text: str,
    name: str,
    fused: bool = True,
    layout: str | None = None,
    change: Callable[[nn.Module], None] | None = None,
    **changes: Any,
) -> dict[str, float]:
    """Return the largest differences of loss and gradients from one process, relative to each tensor's maximum."""
    plan = Plan.parse(plan_text)
    ledger = Ledger()
    mesh = build_mesh(plan, record=ledger.record)
    batch = batch_for(name)
    model = build(name, **changes)
    if change:
        change(model)
    torch.manual_seed(11)
    loss = run(model, name, batch, fused)
    loss.backward()
    wholes = {key: param.grad for key, param in model.named_parameters()}
    other = build(name, **changes)
    if change:
        change(other)
    placements = shard_tensors(other, mesh, Layout.parse(layout) if layout else None)
    torch.manual_seed(11)
    other_loss = run(other, name, batch, fused)
    other_loss.backward()
    found = {"loss": abs(float(other_loss.detach() - loss.detach())) / abs(float(loss.detach()))}
    tp = mesh["tp"]
    least = 1e-6 * max(float(grad.abs().max()) for grad in wholes.values() if grad is not None)
    for key, param in other.named_parameters():
        expected = wholes[key]
        if expected is None:
            assert param.grad is None or not param.grad.any(), key
            continue
        assert param.grad is not None, key
        placement = placements.get(key, WHOLE)
        if placement.index is not None:
            full = torch.zeros_like(expected)
            full.index_add_(placement.dim, torch.tensor(placement.index), param.grad)
            full = all_reduce(full, tp)
        elif placement.cut:
            parts = all_gather(param.grad.contiguous(), tp).view(tp.size, *param.shape)
            full = placement.join(list(parts))
        else:
            full = all_reduce(param.grad.clone(), tp) if placement.partial else param.grad
        difference = float((full - expected).abs().max()) / max(float(expected.abs().max()), least)
        found[key] = difference
    return found


def worst(cases: list[tuple[str, str, dict[str, Any]]]) -> dict[str, tuple[str, float]]:
    """Return the largest difference of each case, for many cases in one call of a pool of ranks."""
    results: dict[str, tuple[str, float]] = {}
    for plan, name, options in cases:
        found = differences(plan, name, **options)
        where = max(found, key=lambda key: found[key])
        results[f"{plan} {name} {options}"] = (where, found[where])
    return results
