"""Exports of a script's models: averages of the weights under every plan, full tensors, Hugging Face folders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.config.plan import Plan
from weft.errors import CheckpointError, ModelError
from weft.models.adapters import adapted, merged_tensors
from weft.models.keras_model import is_keras, with_full
from weft.models.peft_files import save_adapter
from weft.parallel.replicas.local_sgd import anchored
from weft.parallel.state.flat_slices import FlatSlice, Original, StateSource, flat_of, originals_of
from weft.parallel.state.gradients import data_parallel, originals
from weft.parallel.tables.model import table_weights
from weft.private_torch import foreach_lerp_
from weft.train.states.state_io import on_first
from weft.train.states.whole_copy import full_tensors


class Ema:
    """The moving average of all trained weights in the masters' dtype: decay * average + (1 - decay) * weights.

    The first update copies the weights, like torch's AveragedModel. The average needs as much memory as this rank's
    masters, on the same device.

    Raises:
        ModelError: if the decay is not in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float = 0.999):
        if not 0.0 <= decay < 1.0:
            raise ModelError(
                f"decay={decay}: the share of the average that an update keeps must be at least 0 and "
                "below 1. Use 0.999."
            )
        self.decay = decay
        self.num_updates = 0
        self._engine = data_parallel(model)
        self._is_swapped = False
        self._average = {name: weight.clone() for name, weight in self._engine.local_weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages after an optimizer step. Local; no communication.

        Raises:
            ModelError: inside `swapped`.
        """
        if self._is_swapped:
            raise ModelError("ema.update(): the averages are in the model now. Call it outside ema.swapped().")
        weights = self._engine.local_weights()
        if self.num_updates == 0:
            self._average = {name: weight.clone() for name, weight in weights.items()}
        else:
            averages, live = self._paired(weights)
            if averages:
                foreach_lerp_(averages, live, 1.0 - self.decay)
        self.num_updates += 1

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Exchange the model's weights with the averages in place, for the duration of a block. All ranks call it.

        Use it for evaluation and export. Under zero=1 and 2 it gathers the weights.

        Raises:
            ModelError: inside another `swapped`, or on exit if a training step inside changed the averages.
        """
        if self._is_swapped:
            raise ModelError("ema.swapped(): the averages are in the model already. Leave the block around it first.")
        self._swap()
        self._is_swapped = True
        before = self._sums()
        try:
            yield
            trained = self._sums() != before
        finally:
            self._is_swapped = False
            self._swap()
        if trained:
            raise ModelError(
                "ema.swapped(): the model changed inside the block, so a step trained the averages and not the "
                "weights. Load the last checkpoint, and call the step outside ema.swapped()."
            )

    def flat_slices(self) -> Iterator[FlatSlice]:
        """Yield the flat slices of the averages that this rank stores, for checkpoints. Local; no communication.

        Raises:
            ModelError: inside `swapped`.
        """
        if self._is_swapped:
            raise ModelError("ema: the averages are in the model now. Save and load outside ema.swapped().")
        averages, weights = self._paired(self._engine.local_weights())
        by_memory = {one.data_ptr(): average for average, one in zip(averages, weights, strict=True) if one.numel()}
        for one in self._engine.model_slices():
            if one.flat.numel() and one.flat.data_ptr() in by_memory:
                yield replace(one, flat=flat_of(by_memory[one.flat.data_ptr()]))

    def restore(self, source: StateSource, num_updates: int) -> None:
        """Restore the averages from a checkpoint of any plan."""
        for one in self.flat_slices():
            one.fill(source)
        self.num_updates = num_updates

    def _sums(self) -> list[str]:
        """Return checksums of this rank's weights, as text so that NaN equals NaN."""
        return [str(float(weight.sum(dtype=torch.float64))) for weight in self._engine.local_weights().values()]

    @torch.no_grad()
    def _swap(self) -> None:
        averages, live = self._paired(self._engine.local_weights())
        for average, weight in zip(averages, live, strict=True):
            before = weight.clone()
            weight.copy_(average)
            average.copy_(before)
        self._engine.publish()

    def _paired(self, weights: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the averages, and this rank's weights in the same order, as two lists.

        If the weights are sharded differently than in the constructor, the averages become copies of the weights before
        the first update; after it, ModelError is raised.
        """
        own = {name: average.shape for name, average in self._average.items()}
        if own != {name: weight.shape for name, weight in weights.items()}:
            if self.num_updates:
                raise ModelError(
                    "ema: an optimizer was made after the ema and divided the weights again. Make the "
                    "ema after the last optimizer."
                )
            self._average = {name: weight.clone() for name, weight in weights.items()}
        return [self._average[name] for name in weights], list(weights.values())


def moving_average(plan: Plan, model: nn.Module, decay: float) -> Ema:
    """Return an `Ema` of the model. Raise ModelError if the plan does not support it."""
    if plan.gather == "diff4":
        raise ModelError(
            "gather=diff4: averages that replace the weights would be encoded as differences, which changes the "
            "training. Leave run.ema out, or gather."
        )
    if table_weights(model):
        raise ModelError(
            "tables: an average of all rows would change rows that a step does not read. Leave run.ema out, or the "
            "tables out of layout."
        )
    if plan.sync != "step":
        raise ModelError(
            f"sync={plan.sync}: an average of weights would be another one on each replica. Leave "
            "run.ema out, or use sync=step."
        )
    return Ema(model, decay)


# Export of parallelized models, and of full tensors if the model is sharded.


def export_pretrained(
    mesh: Mesh, model: nn.Module, folder: str | Path, dtype: torch.dtype | None, options: Mapping[str, Any]
) -> None:
    """Write a model with its own save_pretrained, after merging an adapter. All ranks call it, and rank 0 writes.

    Raises ModelError if the model has no save_pretrained.
    """
    if not callable(getattr(model, "save_pretrained", None)):
        raise ModelError(
            f"model of type {type(model).__name__}: it has no save_pretrained. "
            f"Use run.full_state_dict(model) and save its result."
        )
    whole, known = full_tensors(mesh, model), originals(model)
    if whole and adapted(model) is not None:
        whole = merged_tensors(model, whole)
        known = {name: one for name, one in known.items() if name in whole}
    on_first(mesh, lambda: write_pretrained(model, folder, whole, known, dtype, options))


def export_keras(mesh: Mesh, model: nn.Module, path: str | Path, options: Mapping[str, Any]) -> None:
    """Write a Keras model with its own save. All ranks call it, and rank 0 writes.

    Raises ModelError for other models.
    """
    if not is_keras(model):
        raise ModelError(f"model of type {type(model).__name__}: it is not a Keras model. Use run.save.")
    whole = full_tensors(mesh, model)

    def write() -> None:
        keras_model: Any = model
        with with_full(model, whole):
            keras_model.save(path, **options)

    on_first(mesh, write)


def export_adapter(mesh: Mesh, model: nn.Module, folder: str | Path, base: str | None) -> None:
    """Write a model's adapter in peft's format. All ranks call it, and rank 0 writes."""
    with anchored(model):
        trained = dict(data_parallel(model).weights())  # only of trained parameters, without the base
        on_first(mesh, lambda: save_adapter(model, folder, trained, base=base))


def write_pretrained(
    model: nn.Module,
    folder: str | Path,
    whole: Mapping[str, torch.Tensor],
    originals: Mapping[str, Original],
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
) -> None:
    """Write full tensors with the model's own save_pretrained. Runs on one rank, without communication.

    If the files' dtype differs from the model's config, the config and its file are changed to that dtype.
    """
    tensors = _in_format(whole, originals, dtype)
    formats = [tensors[name].dtype for name, one in originals.items() if one.is_parameter]
    save: Any = model.save_pretrained
    save(str(folder), state_dict=tensors, **options)
    # transformers wrote the dtype of the model's weights into the config. The files may have another one.
    written = next((dtype for dtype in formats if dtype.is_floating_point), None)
    config: Any = getattr(model, "config", None)
    field = "dtype" if hasattr(config, "dtype") else "torch_dtype"
    if written is not None and (Path(folder) / "config.json").exists() and hasattr(config, "save_pretrained"):
        name = str(written).removeprefix("torch.")
        if str(getattr(config, field, None)).removeprefix("torch.") != name:
            setattr(config, field, name)
            config.save_pretrained(str(folder))


def pretrained_from_full(
    model: Any, whole: Mapping[str, torch.Tensor], folder: str | Path, dtype: torch.dtype | None
) -> None:
    """Write full tensors as a Hugging Face folder. The model may be on the meta device.

    Args:
        model: a model with save_pretrained; its config is written to the same folder.
        whole: full tensors with the model's own names and shapes.
        folder: output folder.
        dtype: dtype of floating tensors in the files; None to keep theirs.

    Raises:
        CheckpointError: if the tensors belong to another model.
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
    found: dict[str, torch.Tensor] = {}
    for name, one in originals.items():
        if one.first != name:
            found[name] = found[one.first]
            continue
        tensor = whole[name]
        wanted = dtype if dtype is not None and tensor.is_floating_point() else one.dtype
        found[name] = tensor.to(wanted)
    return found
