"""Small configs of any Hugging Face family: transformers' own defaults with few layers, narrow widths and few tokens.

A size is recognized by its name, in the config and in the configs inside it (text, vision, audio, backbone).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

#: Small values for what configs call their sizes.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "word_embed_proj_dim", "embedding_size"), 16
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "d_kv", "ffn_hidden_size"), 8),
    **dict.fromkeys(("head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "n_group", "moe_k"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64),
    "max_source_positions": 20,
    "num_mel_bins": 8,
    "image_size": 32,
    "patch_size": 16,
    "vocab_size": 61,
    "first_k_dense_replace": 1,
    "type_vocab_size": 2,
    "sliding_window": 8,
}
"""Values by exact name."""

#: Values by a pattern of the name, the first that matches. None: the default stays.
PATTERNS: tuple[tuple[str, int | None], ...] = (
    (
        r"kernel|stride|padding|num_channels|in_channels|in_chans|temporal_patch|merge|factor|multiplier|freq|version",
        None,
    ),
    (r"num_(hidden_)?groups$|interval|shift|num_labels|_idx|index$|indices|reduction|every|ratio|bits|dilation", None),
    (r"^(encoder|decoder)?_?depth$|(^|_)layers$|layers_per_stage|num_layer$|num_.*_layers$|n_layer|num_blocks$", 2),
    (r"(kv|key_value)_?heads$|num_kv", 2),
    (r"heads$|n_head$|head_num$|head_count$|num_head$", 4),
    (r"upsample_groups", 16),
    (r"mamba_?(n|num)?_?groups|n_groups$|ngroups", 1),
    (r"head_?(dim|size)$|d_head$|headdim$|_key_dim$|_value_dim$", 8),
    (r"state_size$|d_state$|state_dim$|ssm_state|rank$|_r$", 8),
    (r"chunk_?size|block_size$|window_size$|block_length", 8),
    (r"experts_per|top_?k$|_topk$|moe_k$|num_selected", 2),
    (r"(num|n)_.*experts$|experts$|expert_num$", 4),
    (r"intermediate|ffn|^dff$|ff_dim|feed_?forward|mlp_(dim|hidden)|inner|linear_units|d_ff", 32),
    (r"mel_bins|num_mels|n_mels|feature_size$|num_mel|mel_dim", 8),
    (r"codebook_size", 64),
    (r"vocab|num_embeddings$", 61),
    (r"position|max_.*len|seq_?len|context_(length|size)|n_ctx|max_length", 64),
    (r"hidden|embed|width|channels|filters|_dim$|^dim|dims?$|d_model|^d_|proj.*size|(in|out)put_size|_size$", 16),
    (r"num_queries|num_latents|num_query_tokens|tokens_per_image|image_seq_len|num_image_tokens", 4),
)
#: Sizes that need other values in a family, by model type; of a config inside a config by its own type.
SPECIAL: dict[str, dict[str, Any]] = {
    "align_vision_model": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128, "image_size": 32},
    "bamba": {"attn_layer_indices": [1], "mamba_d_head": 8},
    "apertus1p5_vq": {"decoder_attention_num_groups": 4},
    "cosmos3_edge_text": {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                             "mrope_section": [2, 1, 1]}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1)},
    "gemma4_assistant": {},
    "neomme": {"head_dim": 16},
    "bit": {"num_groups": 4},
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1), "resolution": 16},
    "chameleon": {"vocabulary_map": {"<image>": 10}},
    "emu3": {"vocabulary_map": {"<image>": 10}},
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    },
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_ocr2_sam_vision_model": {"global_attn_indexes": (1,), "image_size": 64},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "num_hidden_layers": 4,
             "layer_types": ["sliding_attention", "full_attention"] * 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 128, "image_size": 32},
    "ernie4_5_vl_moe_text": {"num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": [8, 8]},
    "esm": {"vocab_size": 61, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"global_head_dim": 8, "head_dim": 8},
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2, "num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1), "latent_channels": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 8},
    "mobilenet_v1": {"depth_multiplier": 0.1, "image_size": 64},
    "mobilenet_v2": {"depth_multiplier": 0.1, "finegrained_output": False, "image_size": 64},
    "mobilevitv2": {"width_multiplier": 0.1, "image_size": 128},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "mobilevit": {"image_size": 64},
    "levit": {"image_size": 64},
    "mimi": {"upsample_groups": 16},
    "xlstm": {"num_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "deepseek_v4": {"head_dim": 16, "o_groups": 2, "num_key_value_heads": 1, "compress_rates":
                    {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "nemotron": {"num_key_value_heads": 4},
    "pp_lcnet": {"scale": 0.1, "class_expand": 32},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
                       "indexer_compress_ratio": 2, "ngram_vocab_size_base": 61,
                       "split_ngram_parts": 1},
    "reformer": {"is_decoder": True, "axial_pos_shape": (4, 4), "axial_pos_embds_dim": (8, 8),
                 "attn_layers": ("local", "lsh"), "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
    "vibevoice_acoustic_tokenizer": {"downsampling_ratios": (2, 2), "depths": (1, 1, 1), "num_filters": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"downsampling_ratios": (2, 2), "depths": (1, 1, 1), "num_filters": 4},
    "wav2vec2-bert": {"vocab_size": 61},
    "wav2vec2-conformer": {"vocab_size": 61},
    "xlnet": {"d_head": 4},
    "cvt": {"depth": (1, 2, 3)},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 4},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
TOKENS = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 3,
    "forced_eos_token_id": None, "forced_bos_token_id": None,
}  # fmt: skip


def small_config(kind: str, class_name: str, form: int = 0) -> Any:
    """A config of that type with small sizes.

    form: 0: one layer of each kind; 1: the kinds of the first layers; 2: four layers.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    wanted = getattr(getattr(transformers, class_name), "config_class", None)
    if wanted is not None and not isinstance(config, wanted):  # the class is of a part, such as the text model
        parts = [part for _, part in _fields(config) if isinstance(part, wanted)]
        config = parts[0] if parts else config
    config = _Shrinker(form).small(config)
    config.architectures = [class_name]
    config.num_labels = 5
    return config


class _Shrinker:
    """Shrinks one config with those inside it; the same token has the same id in all."""

    def __init__(self, form: int):
        self.form, self._ids = form, dict[str, int]()

    def small(self, config: Any, depth: int = 0) -> Any:
        """Build a config of the same class with small sizes."""
        special = SPECIAL.get(config.model_type or type(config).__name__, {})
        values = {**self._layers(config), **special}
        plain = _plain(type(config)) if depth else None
        if getattr(config, "is_encoder_decoder", False):
            values["is_encoder_decoder"] = True
        for name, value in _fields(config):
            if name in values:
                continue
            if hasattr(value, "to_dict"):
                values[name] = self.small(value, depth + 1).to_dict()
            elif name in ("rope_parameters", "rope_scaling"):
                values |= self._rope(name, value, {**vars(config), **values})
            elif name in ("vocab_size", "num_experts_per_tok") and value is None:
                values[name] = SIZES[name]
            elif name == "head_dim" and value is None and "hidden_size" in values:
                values[name] = values["hidden_size"] // (values.get("num_attention_heads") or 4)
            elif (found := self._value(name, value)) is not None:
                values[name] = found
            elif plain is not None and getattr(plain, name, value) != value:
                values[name] = value  # the outer config's own default
        if "depths" in values:  # stages: each halves the image
            values |= {"image_size": _like(config.image_size, 64)} if "image_size" in values else {}
            values.pop("patch_size", None)
        if values.get("kv_lora_rank"):  # latent attention makes keys for every head from one latent
            values |= {name: values["num_attention_heads"] for name in ("num_key_value_heads",) if name in values}
            values |= {"qk_head_dim": 2 * SIZES["qk_rope_head_dim"]} if _takes(config, "qk_head_dim") else {}
        return type(config)(**values)

    def _value(self, name: str, value: Any) -> Any:
        """Return the small value of a field, or None to leave it."""
        if name in TOKENS:
            return None if value is None else [TOKENS[name]] if isinstance(value, list) else TOKENS[name]
        if re.search(r"token_(id|index)$|_token$", name) and isinstance(value, int) and not isinstance(value, bool):
            return self._ids.setdefault(name.replace("index", "id"), 4 + len(self._ids))
        if isinstance(value, bool) or value is None:
            return None
        if name in SIZES and not isinstance(value, (list, tuple, str, dict)):
            return SIZES[name] if type(value) in (int, float) else None
        if type(value) is int:
            small = next((size for pattern, size in PATTERNS if re.search(pattern, name)), None)
            return None if small is None or value == 0 else min(small, value)
        if isinstance(value, (list, tuple)) and value and all(type(each) is int for each in value):
            return self._stages(name, value)
        return None

    def _stages(self, name: str, value: Any) -> Any:
        """Return small values of a list with one number for each stage of a model."""
        kind = type(value)
        if re.search(r"image_size", name):
            return kind(32 for _ in value)
        if re.search(r"depth|layers|blocks|num_block", name):
            return kind(min(1, each) for each in value)
        if re.search(r"heads", name):
            return kind(2 for _ in value)
        if re.search(r"hidden|embed|dim|channels|width|filters|sizes", name) and min(value) >= 8:
            least = min(value)
            return kind(8 * max(1, min(4, each // least)) for each in value)
        return None

    def _layers(self, config: Any) -> dict[str, Any]:
        """Choose layers, and cut each list that has one entry for each layer."""
        name = next((n for n in ("num_hidden_layers", "n_layer", "num_layers") if _takes(config, n)), None)
        number = config.__dict__.get(name) if name else None
        if name is None or type(number) is not int:
            return {}
        if self.form == 2:
            return {name: 4}
        lists = {
            key: list(value)
            for key, value in _fields(config)
            if isinstance(value, (list, tuple)) and len(value) == number > 1 and key != "num_attention_heads"
        }
        kinds = list(zip(*lists.values(), strict=True)) if lists else [()] * number
        firsts = sorted({kinds.index(kind) for kind in kinds})[:4]
        chosen = firsts if self.form == 0 and len(firsts) >= 2 else list(range(min(2, number)))
        return {
            name: len(chosen),
            **{key: [self._entry(key, value[i]) for i in chosen] for key, value in lists.items()},
        }

    def _entry(self, name: str, value: Any) -> Any:
        """Return one layer's entry of a list, small if it is a size."""
        found = self._value(name.removesuffix("s"), value) if type(value) is int and value >= 16 else None
        return value if found is None else found

    def _rope(self, name: str, value: Any, known: dict[str, Any]) -> dict[str, Any]:
        """Shorten the sections of rotary angles (mrope) to a small head."""
        if not isinstance(value, dict) or not isinstance(sections := value.get("mrope_section"), list):
            return {}
        heads = known.get("num_attention_heads") or 4
        half = (known.get("head_dim") or known["hidden_size"] // heads) * value.get("partial_rotary_factor", 1) // 2
        short = [max(1, int(each * half / sum(sections))) for each in sections]
        short[0] += int(half) - sum(short)
        return {name: {**value, "mrope_section": short}}


def _like(value: Any, size: int) -> Any:
    return size if isinstance(value, int) else type(value)(size for _ in value)


def _plain(kind: type) -> Any:
    try:
        return kind()
    except Exception:  # a config may need arguments
        return None


def _takes(config: Any, name: str) -> bool:
    names = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    return name in (names or inspect.signature(type(config).__init__).parameters)


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a config's own fields."""
    names = [field.name for field in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else []
    for name in names or inspect.signature(type(config).__init__).parameters:
        if name in ("self", "kwargs", "transformers_version", "architectures", "id2label", "label2id", "dtype"):
            continue
        try:
            yield name, getattr(config, name)
        except Exception:  # such as a size that differs between layers
            yield name, config.__dict__.get(name)
