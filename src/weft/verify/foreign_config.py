"""Hugging Face models from a config folder, and random inputs for them, for `weft verify`.

Weights are random and no code of the folder is run. Inputs are chosen from the config and the arguments of `forward`:
tokens, images, audio, and decoder tokens for an encoder-decoder.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from weft.config.shapes.hugging_face_config import image_shape, resize
from weft.errors import ModelError
from weft.models.inspect import dry_run, hugging_face
from weft.train.batches.microbatches import call_model
from weft.train.tasks.decoder_loss import IGNORE

#: Settings of randomness in training: dropout, dropped layers, noise of routers, masks over a spectrogram.
_RANDOM = re.compile(r"drop|jitter|^mask_(time|feature)_prob$")
#: Raw audio samples of one item, and the side of an image, for models without a size in their config.
_SAMPLES, _SIDE = 1600, 64


def read_config(path: Path, num_layers: int | None, dim: int | None, vocab_size: int | None) -> Any:
    """Read the config of a folder with the requested depth, width and vocabulary; disable dropout and router noise.

    Raises:
        ModelError: if transformers cannot read the config, or the width cannot be changed to `dim`.
        MissingExtra: if transformers is not installed.
    """
    config = hugging_face.load_model_config(path)
    for part in _parts(config):
        for name, value in list(vars(part).items()):
            if _RANDOM.search(name) and isinstance(value, int | float) and not isinstance(value, bool):
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
    """Return a config and all configs inside it, such as the config of a vision tower."""
    inside = [value for value in vars(config).values() if hasattr(value, "to_dict") and hasattr(value, "model_type")]
    return [config, *(part for each in inside for part in _parts(each))]


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
    return config is not None and bool(_choices(model, 1))


def choose_inputs(model: nn.Module, seq_len: int, text_alone: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shape of one sample of each input, by name: the first choice with which a forward works.

    text_alone: True to leave out images and audio.
    """
    choices = [each for each in _choices(model, seq_len) if not text_alone or each.keys() <= set(hugging_face.TOKENS)]
    dtype = next(model.parameters()).dtype
    for shapes in choices if len(choices) > 1 else ():
        if runs(model, _random_inputs(model, shapes, 2, dtype, torch.Generator().manual_seed(0))):
            return shapes
    return choices[0] if choices else {}


def runs(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Return True if a forward of the model in eval mode works."""
    is_training = model.training
    try:
        with torch.no_grad():
            call_model(model.eval(), batch)
    except Exception:  # other people's code may raise anything
        return False
    finally:
        model.train(is_training)
    return True


def _choices(model: nn.Module, seq_len: int) -> list[dict[str, tuple[int, ...]]]:
    """Return the sets of inputs to try, the likeliest first. Names are ordered as in `input_shapes`."""
    takes = inspect.signature(model.forward).parameters
    first = hugging_face.input_shapes(model, seq_len)
    tokens = {name: shape for name, shape in first.items() if name in hugging_face.TOKENS}
    media: list[dict[str, tuple[int, ...]]] = []
    for part in _parts(model.config):
        mels = next((found for name in _MELS if type(found := getattr(part, name, None)) is int), 0)
        frames = getattr(part, "max_length", None)
        frames = frames if type(frames) is int and frames > 20 else 4 * seq_len
        for name in ("input_features", "input_values") if mels else ():
            media += [{name: (frames, mels)}, {name: (mels, frames)}, {name: (1, mels, frames)}]
        if (number := getattr(part, "num_frames", None) or getattr(part, "frames_per_clip", None)) is not None:
            image = image_shape(part) or (3, _SIDE, _SIDE)
            media += [{"pixel_values": (number, *image)}, {"pixel_values_videos": (number, *image)}]
        channels = getattr(part, "num_channels", None) or getattr(part, "in_channels", None)
        if channels and image_shape(model.config) is None and type(channels) is int:
            media.append({"pixel_values": (channels, _SIDE, _SIDE)})
    media += [{"input_values": (_SAMPLES,)}, {"pixel_values": (3, _SIDE, _SIDE)}]
    known = [each for each in media if each.keys() <= takes.keys() and not each.keys() & tokens.keys()]
    beside = {name: shape for name, shape in tokens.items() if name == "decoder_input_ids"}
    found = [first, *(each | beside for each in known), *(each | tokens for each in known), tokens]
    return [each for index, each in enumerate(found) if each and each not in found[:index]]


#: Names of the number of features of one audio frame.
_MELS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "n_mels", "input_dim")


def inputs_of(
    model: nn.Module,
    shapes: dict[str, tuple[int, ...]],
    size: int,
    seq_len: int,
    dtype: torch.dtype,
    rng: torch.Generator,
) -> dict[str, Any]:
    """Return a batch of `size` random samples for a Hugging Face model, with labels if its output needs them.

    Tokens are (size, seq_len), images (size, channels, side, side), spectrograms (size, mel bins, frames), waves (size,
    samples). The last sample has no trained token, so that ranks count different numbers of tokens.
    """
    batch, kinds = _random_inputs(model, shapes, size, dtype, rng), list(shapes)
    if kinds[-1] in hugging_face.TOKENS:
        if "pixel_values" not in kinds:
            batch["labels"] = token_labels(hugging_face.vocab_size(model.config) or 1, (size, seq_len), rng)
    elif kinds == ["pixel_values"]:
        batch["labels"] = torch.randint(getattr(model.config, "num_labels", 2), (size,), generator=rng)
    return batch


def _random_inputs(
    model: nn.Module, shapes: dict[str, tuple[int, ...]], size: int, dtype: torch.dtype, rng: torch.Generator
) -> dict[str, Any]:
    batch: dict[str, Any] = {}
    for name, shape in shapes.items():
        if name in hugging_face.TOKENS:
            batch[name] = torch.randint(hugging_face.vocab_size(model.config) or 1, (size, *shape), generator=rng)
        else:
            batch[name] = torch.randn((size, *shape), generator=rng, dtype=torch.float64).to(dtype)
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
    vision: Any = getattr(config, "vision_config", None)
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
