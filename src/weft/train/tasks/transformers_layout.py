"""Weft's decoders as Llama and GPT-2 of transformers: config, names and shapes of tensors, tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from weft.checkpoint.arrays import RawArray
from weft.data import Tokenizer
from weft.errors import ModelError
from weft.spec import DecoderSpec

_LLAMA = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
_GPT2 = {"norm1": "ln_1", "norm2": "ln_2", "attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
#: A chat as `weft.data` renders it where a tokenizer has no template of its own.
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Gives a tensor of a checkpoint by its name.
Read = Callable[[str], RawArray]


def layout_config(spec: DecoderSpec, end_id: int, pad_id: int) -> dict[str, Any]:
    """Return the config.json of a decoder.

    Raises:
        ModelError: for a decoder with experts, which no family of transformers computes as Weft does.
    """
    if spec.num_experts:
        raise ModelError(
            "weft export: transformers has no family with the experts of Weft's decoders. Add --own-names for "
            "safetensors under Weft's names."
        )
    common = {
        "vocab_size": spec.vocab_size, "tie_word_embeddings": spec.tied, "bos_token_id": None, "eos_token_id": end_id,
        "pad_token_id": pad_id,
    }  # fmt: skip
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


def layout_tensors(spec: DecoderSpec, read: Read) -> Iterator[tuple[str, RawArray]]:
    """Yield a decoder's tensors under the names and in the shapes of transformers, one after the other.

    Args:
        spec: without experts.
        read: gives a tensor by Weft's name.
    """
    yield from (_gpt2 if spec.family == "gpt2" else _llama)(spec, read)


def _llama(spec: DecoderSpec, read: Read) -> Iterator[tuple[str, RawArray]]:
    yield "model.embed_tokens.weight", read("embed.weight")
    for layer in range(spec.num_layers):
        for ours, theirs in _LLAMA.items():
            yield f"model.layers.{layer}.{theirs}.weight", read(f"blocks.{layer}.{ours}.weight")
    yield "model.norm.weight", read("norm.weight")
    if not spec.tied:
        yield "lm_head.weight", read("head.weight")


def _gpt2(spec: DecoderSpec, read: Read) -> Iterator[tuple[str, RawArray]]:
    """Its matrices are (inputs, outputs), and query, key and value are one."""
    yield "transformer.wte.weight", read("embed.weight")
    yield "transformer.wpe.weight", read("pos_embed.weight")
    for layer in range(spec.num_layers):
        for kind in ("weight", "bias"):
            block, there = f"blocks.{layer}", f"transformer.h.{layer}"
            for ours, theirs in _GPT2.items():
                yield f"{there}.{theirs}.{kind}", _turned([read(f"{block}.{ours}.{kind}")])
            yield f"{there}.attn.c_attn.{kind}", _turned([read(f"{block}.attn.{name}.{kind}") for name in "qkv"])
    for kind in ("weight", "bias"):
        yield f"transformer.ln_f.{kind}", read(f"norm.{kind}")
    if not spec.tied:
        yield "lm_head.weight", read("head.weight")


def _turned(blocks: list[RawArray]) -> RawArray:
    """Outputs of several layers as one, each matrix with its inputs first."""
    joined = np.ascontiguousarray(np.concatenate([block.array() for block in blocks]).T)
    return RawArray(blocks[0].dtype, tuple(joined.shape), joined.reshape(-1).view(np.uint8).data)


def write_tokenizer(source: Path, out: Path) -> None:
    """Write a run's tokenizer as transformers reads it.

    Args:
        source: the run's tokenizer folder.
        out: folder of the model.
    """
    tokenizer = Tokenizer.load(source)
    text = tokenizer.library_json()
    (out / "tokenizer.json").write_text(text, "utf-8")
    from tokenizers import Tokenizer as Library

    library = Library.from_str(text)
    said: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": library.id_to_token(tokenizer.end_id),
        "pad_token": library.id_to_token(tokenizer.pad_id),
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.vocabulary.turn_start_id >= 0:
        said["chat_template"] = _CHATML
    (out / "tokenizer_config.json").write_text(json.dumps(said, indent=1) + "\n")
