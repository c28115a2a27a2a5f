"""Range checks of indices into tables, such as token ids into embeddings, before a GPU assertion ends the process.

A GPU kernel fails on an index out of range with an assertion that names neither the index nor the table. A sharded
table would return zeros. The host checks the values that it sent to the device, so this needs no device sync. Of
indices that are computed on the device, only the first ones are checked, with one device sync.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.data.batches import host_values, leave_check
from weft.errors import ModelError
from weft.private_torch import without_modes


def watch_indices(model: nn.Module) -> None:
    """Check, in forward pre-hooks, the indices of each embedding. Call it before tables are sharded.

    Embeddings that override forward are skipped: OPT's shifts positions before the lookup.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            module.register_forward_pre_hook(_Watch(name, module.num_embeddings))


def check_labels(labels: Tensor, num_classes: int, ignored: int) -> None:
    """Raise ModelError for a label outside the head's range, if the host has the labels' values.

    If `labels` is a buffer that is reused for several batches, the check instead runs at each copy into it. Does
    nothing in a compiled graph.
    """
    if torch.compiler.is_compiling() or leave_check(labels, lambda values: check_labels(values, num_classes, ignored)):
        return
    wrong = _first_outside(labels, num_classes, ignored)
    if wrong is not None:
        raise ModelError(
            f"label {wrong}: the model's head has {num_classes} entries. Use labels from 0 to {num_classes - 1}, and "
            f"{ignored} where nothing is trained: {_remedy(wrong)}"
        )


class _Watch:
    """Forward pre-hook of one embedding, which checks its indices. `rows` is the number of rows of the full table."""

    def __init__(self, name: str, rows: int):
        self._name, self._rows = name, rows
        self._has_asked = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor):
            return
        indices = args[0]
        if leave_check(indices, self._look):
            return
        if host_values(indices) is None:
            if self._has_asked or type(indices) is not Tensor or indices.is_meta:
                return
            self._has_asked = True
            with without_modes():
                indices = indices.detach().cpu()
        self._look(indices)

    def _look(self, indices: Tensor) -> None:
        wrong = _first_outside(indices, self._rows, None)
        if wrong is not None:
            raise ModelError(
                f"id {wrong}: {self._name or 'the model'} (Embedding) has {self._rows} entries. Use ids from 0 to "
                f"{self._rows - 1}: {_remedy(wrong)}"
            )


def _remedy(wrong: int) -> str:
    tokens = "encode the data with the model's own tokenizer"
    return f"{tokens}, or give the model {wrong + 1} entries." if wrong > 0 else f"{tokens}."


def _first_outside(indices: Tensor, size: int, ignored: int | None) -> int | None:
    """Return the first index that is negative or at least `size` and is not `ignored`, or None.

    Only values on the host are checked.
    """
    values = host_values(indices)
    if values is None or values.numel() == 0 or values.is_floating_point():
        return None
    found: np.ndarray[Any, Any] = values.numpy()  # numpy, so no torch mode counts it
    if found.min() >= 0 and found.max() < size:
        return None
    outside = found[(found < 0) | (found >= size)]
    outside = outside if ignored is None else outside[outside != ignored]
    return int(outside.flat[0]) if outside.size else None


# Placeholder for a module that this rank does not hold. Techniques that inspect modules skip it.


class StandIn(nn.Module):
    """Placeholder for another module at `path`. It has that module's attributes and no parameters."""

    def __init__(self, module: nn.Module, path: str):
        super().__init__()
        # In a tuple: a module set as an attribute would become a submodule.
        self.__dict__["_for"] = (module, path)

    @property
    def stands_for(self) -> nn.Module:
        """The module that this one replaces."""
        return self.__dict__["_for"][0]

    @property
    def path(self) -> str:
        """Path of the module in the full model."""
        return self.__dict__["_for"][1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_for"][0], name)
