"""Gathering of metrics over the ranks that read different samples, for accelerate's methods of these names."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import gather_object, recursively_apply

from weft.comm.collectives import all_gather, all_reduce, gather_json
from weft.comm.mesh import Mesh


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
