"""The weights of a pretrained folder beside a head that it lacks, whose values depend on (seed, name) alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.checkpoint.arrays import torch_formats
from weft.checkpoint.parts import Part
from weft.checkpoint.pretrained import JoinedTensors
from weft.models import initialise_parameter
from weft.parallel.local_tensors import originals_of
from weft.train.tasks.published_weights import pretrained_source

#: What `initialise_parameter` draws with.
_USUAL_STD = 0.02


def source_with_head(
    model: Any, folder: Path, seed: int, *, new_head: bool = False
) -> tuple[WeightsWithHead, list[str]]:
    """Return the source of a model's tensors, and the stored names that the model lacks.

    Tensors outside of the model's body, and its pooler, may be missing from the files, or have another shape there.

    Args:
        model: of transformers, as shapes.
        folder: config.json and safetensors files.
        seed: of what is made anew.
        new_head: whether a head of the files is left out.

    Raises:
        CheckpointError, ModelError: as `pretrained_source` raises them.
    """
    body = f"{model.base_model_prefix}."
    has_body = any(name.startswith(body) for name in model.state_dict())

    def may_lack(name: str) -> bool:
        return "pooler." in name or (has_body and not name.startswith(body))

    stored, unexpected = pretrained_source(model, folder, may_lack)
    if new_head:
        heads = [name for name in stored.entries if has_body and not name.startswith(body)]
        stored = stored.without(heads)
        unexpected = sorted([*unexpected, *heads])
    return WeightsWithHead(stored, model, seed), unexpected


class WeightsWithHead:
    """Any stretch of a model's tensors: from the files, and of what they lack from (seed, name).

    Args:
        stored: what the files have.
        model: whole, as shapes; buffers have their values. It is not kept.
        seed: of what is made anew.
    """

    def __init__(self, stored: JoinedTensors, model: nn.Module, seed: int):
        self._stored, self._seed = stored, seed
        # Here, while the model is whole: who lays it over ranks changes it before anything is read.
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
        config = getattr(model, "config", None)
        self._std = float(getattr(config, "initializer_range", None) or _USUAL_STD)
        formats = {torch_dtype: name for name, torch_dtype in torch_formats().items()}
        self._made = {
            name: _MadeTensor(
                one.shape, formats[one.dtype], None if one.is_parameter else state[name].detach().cpu().numpy()
            )
            for name, one in originals_of(model).items()
            if one.first == name and name not in stored.entries
        }
        self.entries: Mapping[str, Any] = {**stored.entries, **self._made}

    @property
    def new_names(self) -> list[str]:
        """The names of what the files lack."""
        return sorted(self._made)

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors read from files so far."""
        return self._stored.num_bytes_read

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a part's line.

        Args:
            name: of the tensor.
            part: which elements of the whole tensor.
            start: place in its line where reading begins, in elements.
            out: filled to its end, in the format of the entry.

        Raises:
            CheckpointError: where bytes of the files are missing or cannot be read.
        """
        if name not in self._made:
            self._stored.read(name, part, start, out)
            return
        whole = self._whole(name)
        target = np.frombuffer(out, whole.dtype)
        target[:] = 0  # rows beyond the whole
        for view in part.views(start, start + len(target)):
            steps = tuple(stride * target.itemsize for stride in view.strides)
            sizes = tuple(high - low for low, high in view.box)
            there = np.lib.stride_tricks.as_strided(target[view.offset :], sizes, steps)
            there[...] = whole[tuple(slice(low, high) for low, high in view.box)]

    def _whole(self, name: str) -> np.ndarray:
        """A new tensor; heads are small, and made again for each piece of them that is asked for."""
        made = self._made[name]
        if made.value is not None:
            return made.value
        found = torch.empty(made.shape, dtype=torch_formats()[made.dtype])
        if found.ndim == 1 and name.endswith("weight"):  # of a norm, whatever its class is called
            found.fill_(1.0)
        elif found.ndim == 1:
            found.zero_()
        else:
            initialise_parameter(found, name, nn.Module(), self._seed)
            found.mul_(self._std / _USUAL_STD)
        return found.numpy()


@dataclass(frozen=True, slots=True)
class _MadeTensor:
    """A tensor that no file has. value: of a buffer, which the model makes itself."""

    shape: tuple[int, ...]
    dtype: str
    value: np.ndarray | None
