"""State of a model and its optimizer as full tensors in memory, as a checkpoint would have it; and its restoration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from weft.checkpoint.read import Part
from weft.checkpoint.safetensors_files import torch_formats
from weft.train.states.model_state import resume, state_slices

Groups = Mapping[str, Mapping[str, torch.Tensor]]


def capture(model: nn.Module, optimizer: torch.optim.Optimizer, *, keep: bool = True) -> dict[str, dict]:
    """Return copies by group and name, from the slices of all ranks. All ranks call it; without `keep` it is empty."""
    mine = [(one.path, one.part, one.start, one.data.cpu().clone()) for one in state_slices(model, optimizer)]
    ranks = [mine]
    if dist.is_initialized() and dist.get_world_size() > 1:
        ranks = [mine] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
    found: dict[str, dict] = {"model": {}, "optimizer": {}}
    for path, part, start, data in [state_slice for pieces_of_rank in ranks for state_slice in pieces_of_rank if keep]:
        group, _, name = path.partition("/")
        if group in found:
            full = found[group].setdefault(name, torch.full(part.shape, 77, dtype=data.dtype))
            for place, line in full_views(part, start, data.reshape(-1), full):
                place.copy_(line)
    return found


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, groups: Groups) -> list[str]:
    """Resume from a checkpoint with these tensors."""
    return resume(model, optimizer, InMemory(groups))


def full_views(part: Part, start: int, line: torch.Tensor, full: torch.Tensor):
    """Yield views of the full tensor, each with the elements of a flat slice that belong to it."""
    for view in part.views(start, start + line.numel()):
        sizes = [high - low for low, high in view.box]
        yield full[tuple(slice(*one) for one in view.box)], line.as_strided(sizes, view.strides, view.offset)


@dataclass
class Entry:
    shape: tuple[int, ...]
    dtype: str


class InMemory:
    """Replaces a Checkpoint."""

    path = "memory"
    state: Mapping[str, object] = {}

    def __init__(self, groups: Groups):
        self._groups = groups

    def entries(self, group: str) -> dict[str, Entry]:
        names = {dtype: name for name, dtype in torch_formats().items()}
        found = self._groups.get(group, {})
        return {name: Entry(tuple(one.shape), names[one.dtype]) for name, one in found.items()}

    def private(self, group: str, rank: int) -> Mapping[str, torch.Tensor]:
        return self._groups.get(group, {})

    def read(self, group: str, name: str, part: Part, start: int, out: memoryview) -> None:
        full = self._groups[group][name].detach().cpu()
        line = torch.frombuffer(out, dtype=full.dtype)
        if part.is_padded:
            line.zero_()
        for place, target in full_views(part, start, line, full):
            target.copy_(place)
