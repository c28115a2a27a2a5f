"""Hugging Face models from a config folder, and random inputs for them, for `weft verify`.

Weights are random and no code of the folder is run. Inputs are chosen from the config and the arguments of `forward`:
tokens, images, audio, and decoder tokens for an encoder-decoder.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from weft.config.hugging_face_config import image_shape, resize
from weft.errors import ModelError
from weft.models.inspect import dry_run, hugging_face
from weft.train.tasks.decoder_loss import IGNORE

_PARTS = ("text_config", "vision_config", "audio_config")


def read_config(path: Path, num_layers: int | None, dim: int | None, vocab_size: int | None) -> Any:
    """Read the config of a folder with the requested depth, width and vocabulary; disable dropout and router noise.

    Raises:
        ModelError: if transformers cannot read the config, or the width cannot be changed to `dim`.
        MissingExtra: if transformers is not installed.
    """
    config = hugging_face.load_model_config(path)
    for part in _parts(config):
        for name in vars(part):
            if "dropout" in name or "jitter" in name or name.endswith("pdrop"):
                setattr(part, name, 0.0)
    if num_layers:
        for part in _parts(config):
            resize(part, layers=num_layers)
            if getattr(part, "layer_types", None):
                part.layer_types = list(part.layer_types)[:num_layers]
    if vocab_size and hasattr(config, "vocab_size"):
        config.vocab_size = vocab_size
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            setattr(config, name, 0)
    if dim:
        _reduce_width(config, dim)
    return config


def _parts(config: Any) -> list[Any]:
    return [config, *(found for name in _PARTS if (found := getattr(config, name, None)) is not None)]


def _reduce_width(config: Any, dim: int) -> None:
    if not hasattr(config, "hidden_size") or not hasattr(config, "num_attention_heads"):
        raise ModelError(
            f"width={dim}: a model of type {config.model_type} has no one width. Change the widths in its config.json."
        )
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
    """Return True if `inputs_of` supports the model."""
    config = getattr(model, "config", None)
    return config is not None and bool(hugging_face.input_shapes(model, 1))


def inputs_of(model: nn.Module, size: int, seq_len: int, dtype: torch.dtype, rng: torch.Generator) -> dict[str, Any]:
    """Return a batch of `size` random samples for a Hugging Face model, with labels if its output needs them.

    Tokens are (size, seq_len), images (size, channels, side, side), spectrograms (size, mel bins, frames), waves (size,
    samples). The last sample has no trained token, so that ranks count different numbers of tokens.
    """
    config: Any = model.config
    shapes, batch = hugging_face.input_shapes(model, seq_len), {}
    vocab_size = hugging_face.vocab_size(config) or 1
    for name, shape in shapes.items():
        if name in hugging_face.TOKENS:
            batch[name] = torch.randint(vocab_size, (size, *shape), generator=rng)
        else:
            batch[name] = torch.randn((size, *shape), generator=rng, dtype=torch.float64).to(dtype)
    kinds = list(shapes)
    if kinds[-1] in hugging_face.TOKENS:
        if "pixel_values" not in kinds:
            batch["labels"] = token_labels(vocab_size, (size, seq_len), rng)
    elif kinds == ["pixel_values"]:
        batch["labels"] = torch.randint(getattr(config, "num_labels", 2), (size,), generator=rng)
    return batch


def samples_with_images(model: nn.Module, count: int, group: int, seq_len: int, seed: int) -> dry_run.LoadedSamples:
    """Return random samples with one or two images each, for a model that replaces image tokens with image features.

    LLaVA and Qwen2-VL are such models. A sample's ids begin with the tokens of its images, each followed by a text
    token. All samples have the same number of tokens, at least `seq_len`. The last sample of each `group` has no
    trained token. Raises ModelError if the model's images cannot be created.
    """
    rng = torch.Generator().manual_seed(seed)
    config: Any = model.config
    tokens = _tokens_of_image(model, rng)
    every = tokens + 1  # without a border, models with image grids treat two images as one
    length = max(seq_len, -(-2 * every // 8) * 8)
    vocab_size, image = hugging_face.vocab_size(config) or 1, hugging_face.image_token(config) or 0
    marks = torch.tensor([value for name, value in vars(config).items() if "token" in name and type(value) is int])
    takes = inspect.signature(model.forward).parameters
    ordinary = [index for index in range(min(vocab_size, len(marks) + 1)) if index not in marks]
    samples: list[dict[str, torch.Tensor]] = []
    while len(samples) < count:
        labels = token_labels(vocab_size, (group, length), rng)
        for number, row in enumerate(labels):
            num_images = 2 if number % 3 == 1 else 1  # uneven between ranks and between microbatches
            ids = torch.randint(vocab_size, (length,), generator=rng)
            ids[torch.isin(ids, marks)] = ordinary[0]
            place = torch.arange(length)
            is_image = (place < num_images * every) & (place % every < tokens)
            sample = {"input_ids": ids.masked_fill(is_image, image), "labels": row.masked_fill(is_image, IGNORE)}
            if "mm_token_type_ids" in takes:
                sample["mm_token_type_ids"] = is_image.int()
            samples.append(sample | _images(config, num_images, rng))
    dataset: Any = samples[:count]  # a list has the methods of a dataset
    return dry_run.LoadedSamples(DataLoader(dataset, collate_fn=_collate))


def _collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack tokens, and concatenate images and patches of all samples."""
    joined = ("pixel_values", "image_grid_thw")
    rows = {name: [sample[name] for sample in samples] for name in samples[0]}
    return {name: torch.cat(each) if name in joined else torch.stack(each) for name, each in rows.items()}


def _images(config: Any, count: int, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the model's input for `count` images: (count, channels, side, side), or patches and their grid sizes."""
    vision = config.vision_config
    merge = getattr(vision, "spatial_merge_size", None)
    if merge is not None and getattr(vision, "temporal_patch_size", None):
        grid, channels = torch.tensor([[1, 2 * merge, 2 * merge]]).repeat(count, 1), getattr(vision, "in_channels", 3)
        width = channels * vision.temporal_patch_size * vision.patch_size**2
        shape = (int(grid.prod(-1).sum()), width)
    elif (found := image_shape(config)) is not None:
        grid, shape = None, (count, *found)
    else:
        raise ModelError(
            f"model of type {config.model_type}: the size of its images is unknown. Return (model, loader) from "
            "package.module:function."
        )
    images = {"pixel_values": torch.randn(shape, generator=rng, dtype=torch.float64)}
    return images if grid is None else images | {"image_grid_thw": grid}


def _tokens_of_image(model: Any, rng: torch.Generator) -> int:
    dtype = next(model.parameters()).dtype
    image = {
        name: each.to(dtype) if each.is_floating_point() else each
        for name, each in _images(model.config, 1, rng).items()
    }
    try:
        with torch.no_grad():
            features = model.get_image_features(**image)
    except Exception as error:  # the model's code may not support these arguments
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise ModelError(
            f"model of type {model.config.model_type}: Weft cannot make images for it ({first}). Return "
            "(model, loader) from package.module:function."
        ) from error
    found = getattr(features, "pooler_output", features)
    parts = [found] if isinstance(found, torch.Tensor) else list(found)
    return sum(part.numel() // part.shape[-1] for part in parts)


def token_labels(vocab_size: int, shape: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """Return labels for some tokens: fewer in each further sample and none in the last, so that counts are uneven."""
    labels = torch.randint(vocab_size, shape, generator=rng)
    labels[torch.rand(shape, generator=rng) > torch.linspace(1.0, 0.5, shape[0])[:, None]] = IGNORE
    labels[-1] = IGNORE
    return labels
