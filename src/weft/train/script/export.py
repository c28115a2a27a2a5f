"""Files of Hugging Face models, from whole tensors and a model that may hold only a part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.errors import CheckpointError
from weft.parallel.local_tensors import Original, originals_of


def write_pretrained(
    model: nn.Module,
    folder: str | Path,
    whole: Mapping[str, torch.Tensor],
    originals: Mapping[str, Original],
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> None:
    """Let the model's own save_pretrained write these tensors. On one rank; no collective."""
    tensors = _in_format(whole, originals, dtype)
    formats = [tensors[name].dtype for name, one in originals.items() if one.is_parameter]
    save: Any = model.save_pretrained
    save(str(folder), state_dict=tensors, **options)
    # transformers wrote the format of the weights of forward, which is that of the files only where nothing is rounded.
    written = next((dtype for dtype in formats if dtype.is_floating_point), None)
    config: Any = getattr(model, "config", None)
    field = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    if written is not None and (Path(folder) / "config.json").exists() and hasattr(config, "save_pretrained"):
        name = str(written).removeprefix("torch.")
        if str(getattr(config, field, None)).removeprefix("torch.") != name:
            setattr(config, field, name)
            config.save_pretrained(str(folder))


def pretrained_from_whole(
    model: Any, whole: Mapping[str, torch.Tensor], folder: str | Path, dtype: torch.dtype | None
) -> None:
    """Write whole tensors as the Hugging Face folder of a model without numbers, such as one on the meta device.

    Args:
        model: with save_pretrained; its config is written beside the tensors.
        whole: tensors by the model's own names, in its shapes.
        folder: where the files go.
        dtype: of floating tensors in the files; None: as they are.

    Raises:
        CheckpointError: where the tensors are another model's.
    """
    originals = originals_of(model)
    names = {name for name, one in originals.items() if one.first == name}
    for name in sorted(names ^ whole.keys()):
        where = "the checkpoint lacks it" if name in names else "the model has no such tensor"
        raise CheckpointError(f"tensor {name!r}: {where}. Give the folder of the model that was trained.")
    for name in names:
        if tuple(whole[name].shape) != originals[name].shape:
            raise CheckpointError(
                f"tensor {name!r}: {tuple(whole[name].shape)} in the checkpoint, {originals[name].shape} in the model. "
                f"Give the folder of the model that was trained."
            )
    saved = {name: replace(one, dtype=whole[one.first].dtype) for name, one in originals.items()}
    write_pretrained(model, folder, whole, saved, dtype, {})


def _in_format(
    whole: Mapping[str, torch.Tensor], originals: Mapping[str, Original], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Tensors in the wanted format; names that shared one go on sharing it, as transformers looks for."""
    found: dict[str, torch.Tensor] = {}
    for name, one in originals.items():
        if one.first != name:
            found[name] = found[one.first]
            continue
        tensor = whole[name]
        wanted = dtype if dtype is not None and tensor.is_floating_point() else one.dtype
        found[name] = tensor.to(wanted)
    return found
