"""Sizes in a Hugging Face config.json or config object, under the key names of all model families: reads and sets them.

It needs no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import ModelError

#: Names that configs use for each size of a model's shape. The first name that exists in a config is used.
_NAMES = {
    "vocab": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "num_heads", "n_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head"),
    "head_dim": ("qk_nope_head_dim", "head_dim"),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "window": ("sliding_window",),
}

#: Additional names that `resize` also sets: encoders, decoders, vision towers, parts of attention, SSM layers.
_BESIDE = {
    "layers": ("depth", "encoder_layers", "decoder_layers", "num_decoder_layers", "n_layers"),
    "hidden": ("dim", "embed_dim", "word_embed_proj_dim", "embedding_size"),
    "heads": (
        "attention_heads", "encoder_attention_heads", "decoder_attention_heads", "mamba_n_heads", "n_mamba_heads",
        "mamba_num_heads",
    ),
    "head_dim": ("rotary_dim", "v_head_dim", "index_head_dim", "mamba_d_head", "mamba_headdim", "mamba_head_dim"),
    "ffn": ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
    "expert_ffn": ("shared_expert_intermediate_size", "ffn_hidden_size"),
    "num_experts": ("moe_num_experts",),
    "top_k": ("moe_k",),
    "positions": ("max_target_positions", "max_source_positions"),
    "window": ("attention_chunk_size", "window_size", "block_size"),
    "groups": ("n_group", "n_groups", "mamba_n_groups", "mamba_ngroups"),
    "expand": ("expand", "mamba_expand"),
    "padding": ("pad_token_id",),
    "top_groups": ("topk_group", "n_shared_experts"),
}  # fmt: skip


def read_numbers(name: str, table: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a model's shape from the contents of a config.json; `name` is used in error messages.

    Raises:
        ModelError: if a size is not an integer, a required one is missing, or the heads do not divide the hidden size.
    """
    found: dict[str, int] = {}
    for field, keys in _NAMES.items():
        key = next((key for key in keys if table.get(key) is not None), None)
        if key is None:
            continue
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**9:
            raise ModelError(f"model={name}: {key}={value!r} in its config.json: a whole number is needed. Correct it.")
        found[field] = value
    missing = [_NAMES[field][0] for field in ("vocab", "hidden", "layers", "heads") if not found.get(field)]
    if found.get("num_experts", 0) > 1 and not found.get("top_k"):
        missing.append("num_experts_per_tok")
    if missing:
        raise ModelError(f"model={name}: its config.json lacks {', '.join(missing)}. Use a complete config.json.")
    if found["hidden"] % found["heads"] and "head_dim" not in found:
        rule = f"it must divide hidden_size={found['hidden']}. Correct its config.json, or add head_dim"
        raise ModelError(f"model={name}: num_attention_heads={found['heads']}: {rule}.")
    return found


def number(config: object, field: str) -> int | None:
    """Return one size of a config's shape: "vocab", "hidden", "layers", "heads", "positions" and so on.

    config: a config object of transformers, or any object with its attributes. Return None if the size is no positive
    integer.
    """
    for key in _NAMES[field]:
        value = getattr(config, key, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def decoder_shape(config: object) -> DecoderSpec | None:
    """Return the shape of a transformers model for plan rules, or None if its config lacks width, layers or heads."""
    hidden, layers, heads = (number(config, field) for field in ("hidden", "layers", "heads"))
    if hidden is None or layers is None or heads is None:
        return None
    ffn = number(config, "ffn") or 4 * hidden
    return DecoderSpec(
        vocab_size=number(config, "vocab") or 1,
        dim=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number(config, "kv_heads") or heads,
        ffn_dim=ffn,
        max_seq_len=number(config, "positions") or 10**9,
        num_experts=number(config, "num_experts") or 0,
        expert_ffn_dim=number(config, "expert_ffn") or ffn,
    )


def resize(config: Any, **sizes: int) -> None:
    """Change sizes in a transformers config, under all names that the config uses for them.

    sizes: new values by the keys of `_NAMES` and `_BESIDE`, such as "hidden" or "layers". Sizes that are None in the
    config, or that it derives from others, are unchanged.
    """
    for field, value in sizes.items():
        # Models without dense layers use the name of the feed-forward width for the width of an expert.
        names = _NAMES.get(field, ())[: 1 if field == "expert_ffn" else None]
        for name in (*names, *_BESIDE.get(field, ())):
            with contextlib.suppress(AttributeError, NotImplementedError, TypeError):
                if type(getattr(config, name, None)) is int:
                    setattr(config, name, value)


def image_shape(config: object) -> tuple[int, int, int] | None:
    """Return channels, height and width of a model's images, or None if it has no image input."""
    for part in (config, getattr(config, "vision_config", None)):
        size: Any = getattr(part, "image_size", None)
        if size:
            height, width = (size, size) if isinstance(size, int) else size
            return getattr(part, "num_channels", 3), height, width
    return None


def config_of_decoder(spec: DecoderSpec) -> dict[str, Any]:
    """Return the config.json of a decoder without experts, as a Llama or GPT-2 config."""
    common = {
        "vocab_size": spec.vocab_size, "tie_word_embeddings": spec.tied, }  # fmt: skip
    if spec.family == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **common, "n_embd": spec.dim,
            "n_layer": spec.num_layers, "n_head": spec.num_heads, "n_inner": spec.ffn_dim,
            "n_positions": spec.max_seq_len, "layer_norm_epsilon": spec.norm_eps, "activation_function": "gelu_new",
            "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
        }  # fmt: skip
    stretched = {
        "rope_type": "llama3", "factor": spec.rope_scale, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **common, "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim, "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads, "num_key_value_heads": spec.num_kv_heads, "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len, "rms_norm_eps": spec.norm_eps, "rope_theta": spec.rope_theta,
        "rope_scaling": stretched if spec.rope_scale != 1 else None, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
