"""`weft ckpt export` of an adapter: in peft's format, or merged into the Hugging Face model it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.checkpoint.load import Checkpoint
from weft.errors import CheckpointError
from weft.models.adapters import Adapted, adapt_layers, merge_adapter
from weft.models.peft_files import write_adapter
from weft.train.model_state import model_tensors, restore_model

if TYPE_CHECKING:
    from weft.train.folder import RunFolder

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def write_alone(
    checkpoint: Checkpoint, said: Mapping[str, Any], out: Path, dtype: str | None, run: RunFolder | None = None
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, and a model card for a run.

    Args:
        checkpoint: an open checkpoint.
        said: the checkpoint's record of its adapter.
        out: output folder.
        dtype: a key of DTYPES.
        run: a `weft train` run, whose base the adapter's config then names.
    """
    tensors, record = checkpoint.tensors("model"), Adapted.read(said)
    own = {f"{path}.{name}" for path, name in record.params()}
    if more := sorted(tensors.keys() - own):
        raise CheckpointError(
            f"tensor {more[0]!r}: it was trained in addition to the adapter, and adapter files cannot contain it. "
            "Use --merge, or --like with the folder of the base, to write both as one model."
        )
    if dtype is not None:
        tensors = {name: tensor.to(FORMATS[dtype]) for name, tensor in tensors.items()}
    if run is None:
        write_adapter(record, out, tensors)
        return
    from weft.train.tasks.export import base_name, write_card

    base = base_name(run)
    write_adapter(record, out, tensors, base=base, task_type=None if base is None else "CAUSAL_LM")
    write_card(run, checkpoint, out)


def merged_into(model: nn.Module, checkpoint: Checkpoint, said: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter's base with the adapter merged, each once. `model` is that base, and is changed.

    Raises:
        CheckpointError: if the model is not the base that the adapter was trained on.
    """
    record = Adapted.read(said)
    modules = dict(model.named_modules())
    # `restore_model` reports tensors that the model lacks.
    adapt_layers(model, {path: modules[path] for path in record.layers if path in modules}, record.kind, seed=0)
    for name, param in model.named_parameters():
        if name in checkpoint.entries("model"):
            param.requires_grad_(True)  # such as a norm that was trained with the adapter
    restore_model(model, checkpoint)
    return model_tensors(merge_adapter(model))
