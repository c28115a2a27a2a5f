"""Whether all ranks built the same model: looked at once, before anything is sent that would not fit."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from weft.comm import all_gather, all_reduce
from weft.errors import CommError, ModelError
from weft.parallel.placement.axes import AxisMap


def check_same_model(model: nn.Module, axes: AxisMap, device: torch.device) -> None:
    """Compare names, whole shapes, cuts and what is trained among the ranks of one stage.

    Args:
        model: this rank's.
        axes: how its parameters are placed.
        device: of the tensors that travel.

    Raises:
        CommError: where a rank built another model; it names tensor and ranks.
        ModelError: for a complex parameter.
    """
    axis = axes.stage
    rows = [
        (name, axes.whole_shape(name, tensor.shape), getattr(tensor, "requires_grad", False), *axes.told(name))
        for name, tensor in model.named_parameters()
    ]
    rows += [
        (name, axes.whole_shape(name, tensor.shape), False, *axes.told(name)) for name, tensor in model.named_buffers()
    ]
    for name, param in model.named_parameters():
        if param.is_complex():
            raise ModelError(f"parameter {name!r}: it is complex. Keep it as torch.view_as_real of it.")
    if axis.size == 1:
        return
    most = all_reduce(torch.tensor([len(rows)], device=device), axis, op="max").item()
    marks = torch.tensor([_mark(row) for row in rows] + [0] * (int(most) - len(rows)), device=device)
    # Extremes, not everybody's marks: what a rank receives must not grow with the number of ranks.
    unlike = (all_reduce(marks.clone(), axis, op="max") != all_reduce(marks.clone(), axis, op="min")).nonzero()
    if len(unlike):
        column = int(unlike[0])
        others = all_gather(marks[column : column + 1], axis)
        ranks = [axis.ranks[rank] for rank in (others != others[0]).nonzero().flatten().tolist()]
        here = rows[column] if column < len(rows) else None
        what = f"tensor {here[0]!r} with shape {here[1]} and requires_grad={here[2]}" if here else "no further tensor"
        raise CommError(
            f"model: rank {', '.join(map(str, ranks))} built another model than rank {axis.ranks[0]}. The first "
            f"difference is tensor number {column}: this rank has {what}. Build the same model on every rank."
        )


def _mark(row: tuple[object, ...]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(row).encode(), digest_size=8).digest(), "little", signed=True)
