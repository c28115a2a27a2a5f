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
from weft.spec.model import config_of_decoder

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
    return {**config_of_decoder(spec), "bos_token_id": None, "eos_token_id": end_id, "pad_token_id": pad_id}


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
    begin = "".join(library.id_to_token(token) or "" for token in tokenizer.vocabulary.begin_ids)
    if len(tokenizer.vocabulary.begin_ids) == 1:
        said |= {"bos_token": begin, "add_bos_token": True}
    elif not begin and library.post_processor is not None:  # data.bos=false may have turned it off
        said |= {"add_bos_token": False}
    if tokenizer.vocabulary.turn_start_id >= 0:
        said["chat_template"] = begin + _CHATML
    (out / "tokenizer_config.json").write_text(json.dumps(said, indent=1) + "\n")
