"""A Hugging Face model by the folder of its config: what `weft verify` builds, feeds and knows of it.

Weights are random and no code of the folder is run. Inputs follow from the config and from what `forward` takes:
tokens, images, sound, and the decoder's own tokens where there is an encoder beside it.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError
from weft.spec.model import image_shape, number
from weft.structure import hugging_face
from weft.train.tasks import IGNORE

#: Where configs keep a number of layers beside num_hidden_layers.
_DEPTHS = ("encoder_layers", "decoder_layers", "num_decoder_layers")
_PARTS = ("text_config", "vision_config", "audio_config")


def read_config(path: Path, num_layers: int | None, dim: int | None, vocab_size: int | None) -> Any:
    """The config of a folder, dropout and router noise off, with the depth, width and vocabulary that are given.

    Raises ModelError where transformers cannot read it, MissingExtra without transformers.
    """
    config = hugging_face.load_model_config(path)
    for part in (config, *(found for name in _PARTS if (found := getattr(config, name, None)) is not None)):
        for name in vars(part):
            if "dropout" in name or "jitter" in name or name.endswith("pdrop"):
                setattr(part, name, 0.0)
    if num_layers:
        _reduce_depth(config, num_layers)
    if vocab_size and hasattr(config, "vocab_size"):
        config.vocab_size = vocab_size
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(config, name, 0)
    if dim:
        _reduce_width(config, dim)
    return config


def _reduce_depth(config: Any, num_layers: int) -> None:
    config.num_hidden_layers = num_layers
    for name in _DEPTHS:
        if hasattr(config, name):
            setattr(config, name, num_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types)[:num_layers]


def _reduce_width(config: Any, dim: int) -> None:
    share = dim / config.hidden_size
    if dim % config.num_attention_heads:
        raise ModelError(
            f"width={dim}: the model has {config.num_attention_heads} heads, and {dim} is not "
            f"a multiple of that. Use a multiple of {2 * config.num_attention_heads}."
        )
    if getattr(config, "head_dim", None):
        config.head_dim = dim // config.num_attention_heads
    for name in ("intermediate_size", "moe_intermediate_size", "ffn_dim"):
        if getattr(config, name, None):
            setattr(config, name, max(8, round(getattr(config, name) * share / 8) * 8))
    config.hidden_size = dim


def has_inputs(model: nn.Module) -> bool:
    """Whether `inputs_of` knows what the model is fed."""
    config = getattr(model, "config", None)
    return config is not None and bool(_kinds(model, config))


def inputs_of(model: nn.Module, size: int, seq_len: int, dtype: torch.dtype, rng: torch.Generator) -> dict[str, Any]:
    """A batch of `size` random samples for a Hugging Face model, with labels where its output has a place for them.

    Tokens are (size, seq_len), images (size, channels, side, side), spectrograms (size, mel bins, frames), waves
    (size, samples). The last sample has no trained token, so that ranks have uneven counts.
    """
    config = model.config  # pyright: ignore[reportAttributeAccessIssue] - `has_inputs` was asked
    kinds, batch = _kinds(model, config), {}
    for name in kinds:
        if name in ("input_ids", "decoder_input_ids"):
            batch[name] = torch.randint(_vocab_size(config) or 1, (size, seq_len), generator=rng)
        else:
            shape = (size, *_sample_shape(name, config, seq_len))
            batch[name] = torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)
    if kinds[-1] in ("input_ids", "decoder_input_ids"):
        if "pixel_values" not in kinds:
            batch["labels"] = token_labels(_vocab_size(config) or 1, (size, seq_len), rng)
    elif kinds == ["pixel_values"]:
        batch["labels"] = torch.randint(getattr(config, "num_labels", 2), (size,), generator=rng)
    return batch


def token_labels(vocab_size: int, shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """Labels of some tokens, fewer from sample to sample and none in the last, so that counts are uneven."""
    labels = torch.randint(vocab_size, shape, generator=rng)
    labels[torch.rand(shape, generator=rng) > torch.linspace(1.0, 0.5, shape[0])[:, None]] = IGNORE
    labels[-1] = IGNORE
    return labels


def _kinds(model: nn.Module, config: Any) -> list[str]:
    """Names of the inputs that the model cannot do without, tokens last."""
    takes = inspect.signature(model.forward).parameters
    known = {
        "pixel_values": image_shape(config) is not None,
        "input_features": getattr(config, "num_mel_bins", None) is not None,
        "input_values": getattr(config, "conv_stride", None) is not None,
        "input_ids": _vocab_size(config) is not None,
        "decoder_input_ids": bool(getattr(config, "is_encoder_decoder", False)),
    }
    return [name for name, is_known in known.items() if is_known and name in takes]


def _vocab_size(config: Any) -> int | None:
    return number(config, "vocab") or number(getattr(config, "text_config", None), "vocab")


def _sample_shape(name: str, config: Any, seq_len: int) -> tuple[int, ...]:
    if name == "pixel_values":
        return image_shape(config) or ()
    if name == "input_features":
        positions = getattr(config, "max_source_positions", None)
        return config.num_mel_bins, 2 * positions if positions else 4 * seq_len
    return (seq_len * math.prod(config.conv_stride) + sum(config.conv_kernel),)
