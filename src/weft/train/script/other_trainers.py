"""Detection of other trainers that wrap models, at the first forward of a parallelized model."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from weft.errors import ModelError

#: Python modules that call the model, and the names of their libraries.
_TRAINERS = {
    "transformers.trainer": "transformers.Trainer",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "torch.nn.parallel.distributed": "DistributedDataParallel",
}


def refuse_other_trainers(model: nn.Module) -> None:
    """Add a hook that raises ModelError in the model's first forward if another trainer library runs it."""
    model.register_forward_pre_hook(_FirstForward(), prepend=True)


class _FirstForward:
    """Forward pre-hook that checks the first call. It is a class so that the model can be copied and pickled."""

    def __init__(self) -> None:
        self._is_over = False

    def __call__(self, model: nn.Module, args: Any) -> None:
        del args
        if self._is_over or torch.compiler.is_compiling():
            return
        self._is_over = True
        if found := _trainer(inspect.currentframe()):
            raise ModelError(
                f"model of type {type(model).__name__}: {found} runs it, and wraps models and synchronizes gradients "
                "itself, as Weft does. Use weft.hf.Trainer, fine-tune with `weft train model.path=FOLDER "
                f"data.train=FILE`, or write the loop with run.train_step and leave {found} out."
            )


def _trainer(frame: FrameType | None) -> str:
    """Return the outermost library on the stack that runs models, or "" if there is none or `weft.hf` runs it."""
    found = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("weft.hf."):
            return ""
        found = next((text for key, text in _TRAINERS.items() if name == key or name.startswith(f"{key}.")), found)
        frame = frame.f_back
    return "Accelerate" if found == "DistributedDataParallel" and "accelerate" in sys.modules else found
