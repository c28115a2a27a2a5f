"""Small random Hugging Face models and their weights under Weft's names, for tests only."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import pytest
import torch
from torch import Tensor

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.decoder import Decoder
from weft.models.registry import build_decoder

_LLAMA_PARTS = {
    "input_layernorm": "norm1",
    "post_attention_layernorm": "norm2",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}


def llama_pair(spec: DecoderSpec) -> tuple[torch.nn.Module, Decoder]:
    transformers = pytest.importorskip("transformers")

    scaling = {"rope_type": "default"}
    if spec.rope_scale != 1:
        scaling = {
            "rope_type": "llama3", "factor": spec.rope_scale, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.dim, intermediate_size=spec.ffn_dim,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_seq_len, rms_norm_eps=spec.norm_eps, tie_word_embeddings=spec.tied,
        rope_parameters={"rope_theta": spec.rope_theta, **scaling}, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    for module in theirs.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = partial(_rms_norm_in_float64, module)
    _shake(theirs)
    return theirs, _load(spec, llama_weights(theirs.state_dict(), spec.num_layers))


def _rms_norm_in_float64(norm: torch.nn.Module, x: Tensor) -> Tensor:
    """transformers' norm always computes in float32, which would hide errors below 1e-6."""
    return x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def llama_weights(theirs: dict[str, Tensor], num_layers: int, kept: Collection[str] = ()) -> dict[str, Tensor]:
    """Map transformers' names to Weft's without changing tensors. kept: omit parts that are initialized differently."""
    ours = {
        "embed.weight": theirs["model.embed_tokens.weight"],
        "norm.weight": theirs["model.norm.weight"],
        "head.weight": theirs["lm_head.weight"],
    }
    for layer in range(num_layers):
        for part, name in _LLAMA_PARTS.items():
            if kept and part.partition(".")[0] not in kept:
                continue
            ours[f"blocks.{layer}.{name}.weight"] = theirs[f"model.layers.{layer}.{part}.weight"]
    return ours


def gpt2_pair(spec: DecoderSpec) -> tuple[torch.nn.Module, Decoder]:
    transformers = pytest.importorskip("transformers")

    config = transformers.GPT2Config(
        vocab_size=spec.vocab_size, n_positions=spec.max_seq_len, n_embd=spec.dim, n_layer=spec.num_layers,
        n_head=spec.num_heads, n_inner=spec.ffn_dim, layer_norm_epsilon=spec.norm_eps,
        tie_word_embeddings=spec.tied, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).double().eval()
    _shake(theirs)
    return theirs, _load(spec, gpt2_weights(theirs.state_dict(), spec.num_layers))


def gpt2_weights(theirs: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """Transposes matrices, which are stored as (in, out), and splits the fused q, k, v."""
    ours = {
        "embed.weight": theirs["transformer.wte.weight"],
        "pos_embed.weight": theirs["transformer.wpe.weight"],
        "norm.weight": theirs["transformer.ln_f.weight"],
        "norm.bias": theirs["transformer.ln_f.bias"],
        "head.weight": theirs["lm_head.weight"],
    }
    parts = {"ln_1": "norm1", "ln_2": "norm2", "attn.c_proj": "attn.o", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    for layer in range(num_layers):
        block = f"transformer.h.{layer}"
        for part, name in parts.items():
            for kind in ("weight", "bias"):
                ours[f"blocks.{layer}.{name}.{kind}"] = _transposed(theirs[f"{block}.{part}.{kind}"])
        for kind in ("weight", "bias"):
            for name, value in zip("qkv", theirs[f"{block}.attn.c_attn.{kind}"].chunk(3, -1), strict=True):
                ours[f"blocks.{layer}.attn.{name}.{kind}"] = _transposed(value)
    return ours


def _transposed(value: Tensor) -> Tensor:
    return value.T if value.ndim == 2 else value


def _load(spec: DecoderSpec, weights: dict[str, Tensor]) -> Decoder:
    ours = build_decoder(spec, dtype=torch.float64)
    ours.load_state_dict(weights)
    return ours.eval()


def _shake(model: torch.nn.Module) -> None:
    """Randomize every parameter. Initial biases of 0 and norms of 1 would hide mistakes."""
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=dice, dtype=parameter.dtype), alpha=0.3)
