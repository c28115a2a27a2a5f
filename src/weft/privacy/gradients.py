"""Clipped sums of per-sample gradients of one model: losses by sample, norms over tp and pp, and clipping weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh
from weft.data.batches import map_tensors, tensors_in
from weft.errors import ModelError
from weft.parallel.state.gradients import data_parallel
from weft.privacy.factors import clip_weights, squares
from weft.privacy.recorder import CHECKPOINTED, GradientRecord, GradientRecorder, Owner, UnknownUse


class SampleGradients:
    """Per-sample gradients of a parallelized model.

    Args:
        clip: largest norm of a sample's gradient.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, clip: float):
        self.model, self.clip = model, clip
        self._axes, self._tp, self._pp = data_parallel(model).axes, mesh["tp"], mesh["pp"]
        self._device = mesh.device
        self._owners: dict[int, tuple[nn.Parameter, Owner]] = {}
        #: Modules by path whose gradients are computed by vmap, because an operation in them is unknown.
        self.alone: dict[str, nn.Module] = {}

    def _owner_of(self, param: nn.Parameter) -> Owner:
        found = self._owners.get(id(param))
        if found is None:
            # zero=3 replaces parameters by gathered ones while a module runs.
            for name, one in self.model.named_parameters():
                if id(one) not in self._owners:
                    placement = self._axes.placement(name)
                    is_counted = "tp" in placement.cut or self._tp.rank == 0
                    self._owners[id(one)] = one, Owner(name, is_counted, "tp" in placement.partial)
            found = self._owners.get(id(param))
        if found is None:
            raise ModelError(
                f"privacy: forward reads a trained parameter of shape {tuple(param.shape)} that is not a parameter of "
                "the model, so its gradients would be neither clipped nor counted. Register it in the model, or set "
                "its requires_grad to False."
            )
        return found[1]

    def record(self, samples: int, *, keeps: bool, each: int = 1) -> GradientRecord:
        """Return an empty record for a microbatch, in which `each` adjacent samples are a unit."""
        return GradientRecord(samples, self._owner_of, keeps=keeps, each=each)

    def recorder(self, record: GradientRecord) -> GradientRecorder:
        """Return the mode that fills a record."""
        return GradientRecorder(record, self.model, self.alone)

    def handle(self, unknown: UnknownUse, *, may_retry: bool) -> None:
        """Let vmap compute the gradients of the module that owns a parameter.

        Raises ModelError, which names the module, if it did so already or `may_retry` is False.
        """
        for path, module in self.model.named_modules():
            if any(param is unknown.param for param in module.parameters(recurse=False)):
                if may_retry and path and not self._runs_alone(path):
                    # A module of which a part was alone so far takes the part in.
                    self.alone = {one: part for one, part in self.alone.items() if not one.startswith(f"{path}.")}
                    self.alone[path] = module
                    return
                shown = f"{path} ({type(module).__name__})" if path else type(module).__name__
                raise ModelError(
                    f"privacy: {shown} reads a parameter in {unknown.operation}, whose per-sample gradients are "
                    "unknown. Freeze it, or build it from linear layers, embeddings, convolutions and norms."
                ) from unknown
        raise unknown

    def _runs_alone(self, path: str) -> bool:
        return any(path == one or path.startswith(f"{one}.") for one in self.alone)

    def check_graph(self, losses: Tensor) -> None:
        """Raise ModelError if backward from `losses` would reach a parameter that the recorder has not replaced."""
        waiting: list[Any] = [losses.grad_fn]
        visited: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            if type(node).__name__ == "CheckpointFunctionBackward":
                raise ModelError(CHECKPOINTED)
            found = self._owners.get(id(getattr(node, "variable", None)))
            if found is not None and found[0].requires_grad:
                self.refuse_unseen(found[1].name)
            waiting.extend(following for following, _ in node.next_functions)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raise ModelError if a backward in this context delivers a parameter's gradient, which nothing has clipped."""
        arrived: list[str] = []
        handles = [
            param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
            for name, param in self.model.named_parameters()
            if param.requires_grad and param.is_leaf
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if arrived:
            self.refuse_unseen(arrived[0])

    def refuse_unseen(self, name: str) -> None:
        """Raise ModelError for a parameter whose gradient is computed outside the recorder."""
        raise ModelError(
            f"privacy: the gradient of {name} comes from a custom autograd function, a checkpointed part or the loss "
            "function, so it would not be clipped by sample. Freeze it, or build its layer from linear layers, "
            "embeddings, convolutions and norms, without torch.utils.checkpoint."
        )

    def weights(self, records: Sequence[GradientRecord]) -> list[Tensor]:
        """Return the clipping weight of each unit of each record, (units,) float64. All ranks of tp and pp call it."""
        every = self.norms(records)
        for record, norms in zip(records, every, strict=True):
            left_out = ~torch.isfinite(norms)
            record.left_out = left_out if bool(left_out.any()) else None
        return [clip_weights(norms, self.clip) for norms in every]

    def norms(self, records: Sequence[GradientRecord]) -> list[Tensor]:
        """Return the squared norm of each unit of each record, (units,) float64, equal on all ranks of tp and pp.

        All ranks of tp and pp call it.
        """
        totals = [self._with_partial(record) for record in records]
        total = totals[0] if len(totals) == 1 else torch.cat(totals)
        for axis in (self._tp, self._pp):
            if axis.size > 1:
                total = all_reduce(total.contiguous(), axis)
        return list(total.split([record.units for record in records]))

    def _with_partial(self, record: GradientRecord) -> Tensor:
        total = record.norms(self._device)
        if not record.partial:
            return total
        # In the order of names, which is equal on all ranks.
        flat = torch.cat([record.partial[name].flatten(1) for name in sorted(record.partial)], 1)
        record.partial = {}
        whole = all_reduce(flat.contiguous(), self._tp)
        return total + squares(whole) if self._tp.rank == 0 else total


def sample_losses(
    loss: Callable[[Any, Any], tuple[Tensor, Tensor | int]], output: Any, parts: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each sample, its sum over the sample's tokens without gradient, and their number; (B,) each.

    A sample's loss is the mean over its tokens, and 0 without tokens.

    Args:
        loss: (output, batch) -> (sum of losses, count).
        output: the model's output for a batch; each of its tensors has one row for each sample, or no dim.
        parts: the batch of each sample.
    """
    pairs = [loss(*pair) for pair in zip(_rows(output, len(parts)), parts, strict=True)]
    sums = torch.stack([loss_sum for loss_sum, _ in pairs])
    counts = torch.stack([torch.as_tensor(count, device=sums.device, dtype=torch.float64) for _, count in pairs])
    return sums / counts.clamp_min(1).to(sums.dtype), sums.detach().double(), counts


def _rows(output: Any, samples: int) -> list[Any]:
    """Return the output of each sample. One backward node divides each tensor, not one for each sample."""
    divided: dict[int, tuple[Tensor, ...]] = {}
    for tensor in tensors_in(output):
        if tensor.ndim and len(tensor) != samples:
            raise ModelError(
                f"privacy: the model's output has a tensor of shape {tuple(tensor.shape)} for {samples} samples. "
                "Return a row for each sample, so that each has a loss of its own."
            )
        divided[id(tensor)] = tensor.split(1) if tensor.ndim else (tensor,) * samples
    if not divided:
        raise ModelError(f"privacy: the model's output is a {type(output).__name__} without tensors. Return tensors.")
    return [map_tensors(lambda one, index=index: divided[id(one)][index], output) for index in range(samples)]
