"""A trainer's accelerator under a plan: it gathers over the data ranks, and leaves the trained model to Weft."""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate.utils import gather_object, recursively_apply
from torch import nn

from weft.comm.collectives import all_gather, all_reduce, gather_json
from weft.comm.mesh import Mesh
from weft.errors import ModelError
from weft.hf.loading import rank_loader


class DataGather:
    """Gathers and reduces over the data ranks. Other ranks have the same samples as one of these.

    Args:
        accelerator: accelerator of all ranks.
        mesh: mesh of the same ranks.
    """

    def __init__(self, accelerator: Any, mesh: Mesh):
        self._accelerator, self._mesh = accelerator, mesh
        self._pad = accelerator.pad_across_processes
        self._ranks: list[int] | None = None

    def gather(self, tensor: Any) -> Any:
        """Return the tensors of all data ranks, joined along dim 0. All ranks call it."""
        if self._mesh.world_size == 1:
            return tensor
        return recursively_apply(self._joined, tensor, error_on_other_type=True)

    def _joined(self, one: torch.Tensor) -> torch.Tensor:
        rows = one[None] if one.ndim == 0 else one.contiguous()
        return all_gather(rows, self._mesh.data).view(self._mesh.data.size * len(rows), *rows.shape[1:])

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all data ranks without those that repeat samples at the end of a loader."""
        try:
            recursively_apply(lambda one: one, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            every, ranks = gather_object(input_data), self._first_ranks()
            each = len(every) // self._mesh.world_size if self._mesh.world_size > 1 else len(every)
            data = [one for rank in ranks for one in every[rank * each : (rank + 1) * each]]
        else:
            data = self.gather(self._pad(input_data, dim=0) if self._mesh.data.size > 1 else input_data)
        state = self._accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        if use_gather_object:
            return data[: state.remainder]
        return recursively_apply(lambda one: one[: state.remainder], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or mean over the data ranks, or `tensor` if reduction is "none". `scale` is ignored.

        All ranks call it.
        """
        data = self._mesh.data
        if data.size == 1 or reduction == "none":
            return tensor

        def reduced(one: torch.Tensor) -> torch.Tensor:
            total = all_reduce(one.detach().clone(memory_format=torch.contiguous_format), data)
            return total / data.size if reduction == "mean" else total

        del scale  # accelerate applies it to XLA tensors only
        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def _first_ranks(self) -> list[int]:
        """Return the first rank with the samples of each data rank."""
        if self._ranks is None:
            mesh = self._mesh
            found = gather_json(mesh.data.rank, mesh.world, mesh.device) if mesh.world_size > 1 else [0]
            self._ranks = [found.index(rank) for rank in range(mesh.data.size)]
        return self._ranks


class PlannedAccelerator:
    """Replaces methods of a trainer's accelerator.

    Args:
        trainer: a `PlannedTrainer` with its accelerator.
        mesh: the mesh of the ranks.
    """

    def __init__(self, trainer: Any, mesh: Mesh):
        self._trainer, self._mesh, self._own = trainer, mesh, trainer.accelerator
        self._prepare = self._own.prepare_model

    def install(self) -> None:
        """Replace the methods."""
        own, gather = self._own, DataGather(self._own, self._mesh)
        own.gather, own.gather_for_metrics, own.reduce = gather.gather, gather.gather_for_metrics, gather.reduce
        own.prepare_data_loader, own.prepare_model = self._prepare_loader, self._prepare_model
        own.prepare_optimizer = lambda optimizer, device_placement=None: optimizer
        own.backward = self._refuse_backward
        self._trainer.gather_function = functools.partial(
            own.gather_for_metrics, use_gather_object=self._trainer.args.eval_use_gather_object
        )

    def _prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if model is self._trainer.model:
            return model
        if not kwargs.get("evaluation_mode"):
            raise ModelError(
                f"model of type {type(model).__name__}: the trainer trains a second model, and a plan is for one. "
                "Train it in a loop of your own with weft.init."
            )
        return self._prepare(model, *args, **kwargs)

    def _refuse_backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        del loss, kwargs
        name = type(self._trainer).__name__
        raise ModelError(
            f"{name}.training_step: it runs backward itself, and Weft runs the passes of a step in the plan's order. "
            "Override compute_loss instead."
        )

    def _prepare_loader(self, loader: Any, device_placement: Any = None, slice_fn_for_dispatch: Any = None) -> Any:
        del device_placement, slice_fn_for_dispatch
        args, trains = self._trainer.args, self._trainer.weft_loads_training
        seed = args.data_seed
        if seed is None and trains:  # scripts may seed ranks differently
            seed = gather_json(torch.initial_seed(), self._mesh.world, self._mesh.device)[0]
        found = rank_loader(loader, self._mesh.data, args.device, seed, trains=trains)
        self._own._dataloaders.append(found)
        return found
