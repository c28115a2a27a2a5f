"""Opening a Hugging Face folder whose weights do not fit into memory."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError
from weft.generation.streamed import WeightStream, stream_weights
from weft.models.decoder import as_shapes
from weft.models.inspect import hugging_face
from weft.train.weights.published_weights import pretrained_source

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def open_streamed(
    folder: Path, memory_bytes: int, dtype: str | None = None, device: str = "cpu", *, from_host: bool = False
) -> tuple[nn.Module, WeightStream]:
    """Return the causal language model of a Hugging Face folder, in eval mode, with its weights within a memory limit.

    Args:
        folder: config.json and safetensors files.
        memory_bytes: limit for weights and read buffers, as in `stream_weights`.
        dtype: fp32, bf16, fp16 or fp64. None: the dtype in config.json, or else fp32.
        device: the device of the forwards.
        from_host: as in `stream_weights`.

    Raises:
        ModelError: if the memory is too small, the dtype is unknown, or the folder has no such model.
        CheckpointError: if the weights are missing, damaged or do not fit config.json.
    """
    config = hugging_face.load_model_config(folder)
    kind = _dtype_of(dtype, config)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    try:
        with as_shapes(vectors=True):
            model = hugging_face.causal_model(config)
    finally:
        torch.set_default_dtype(usual)
    _keep_in_float32(model, kind)
    choose_experts: Any = getattr(model, "set_experts_implementation", None)
    if kind == torch.float64 and choose_experts is not None:
        choose_experts("eager")  # torch's grouped products lack float64
    source, _ = pretrained_source(model, folder)
    gc.collect()  # transformers' tables leave megabytes in cycles
    return model.eval(), stream_weights(model, source, memory_bytes, device, from_host=from_host)


def _dtype_of(text: str | None, config: Any) -> torch.dtype:
    if text is None:
        found = getattr(config, "dtype", None)
        return found if isinstance(found, torch.dtype) and found in _DTYPES.values() else torch.float32
    if text not in _DTYPES:
        raise ModelError(f"dtype={text}: not a dtype of weights. Use {', '.join(_DTYPES)}.")
    return _DTYPES[text]


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the weights that the model's class keeps in float32 that dtype, like `from_pretrained`."""
    patterns: list[str] = []
    if dtype in (torch.float16, torch.bfloat16):
        patterns += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if dtype == torch.float16:
        patterns += getattr(model, "_keep_in_fp32_modules", None) or ()
    kept = [re.compile(re.escape(pattern).replace(r"\*", ".*")) for pattern in patterns]
    for name, param in model.named_parameters():
        if any(pattern.search(name) for pattern in kept):
            param.data = param.data.float()
