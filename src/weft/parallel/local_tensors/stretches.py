"""What a rank holds of a model's tensors and of an optimizer's states, for checkpoints: each a stretch of memory.

Saving writes this rank's share of each stretch, and loading fills it: no rank ever holds more than it trains with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from weft.checkpoint.arrays import torch_formats
from weft.checkpoint.parts import Deal, Part
from weft.errors import CheckpointError

#: Elements that travel at once where the saved format is another than ours, or the memory is a device's.
_AT_ONCE = 2**23


class SavedTensor(Protocol):
    """Shape and format of a tensor in a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> str:
        """The name of its dtype, as safetensors writes it."""
        ...


class StateSource(Protocol):
    """A group of a checkpoint: what there is, and any stretch of it."""

    @property
    def entries(self) -> Mapping[str, SavedTensor]:
        """What was saved, by name."""
        ...

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a part's line, in the saved format.

        Args:
            name: of the tensor.
            part: which elements of the whole tensor.
            start: place in its line where reading begins, in elements.
            out: filled to its end.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Elements of one tensor that lie here. flat: its memory, 1-D, the part's line from `start` on.

    name: in checkpoints. deal: who writes which of them. home: where they go once loaded, where `flat` is a copy.
    """

    name: str
    part: Part
    deal: Deal
    start: int
    flat: torch.Tensor
    home: torch.Tensor | None = None

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor, part: Part, deal: Deal) -> Stretch:
        """Return the stretch of a tensor of which this rank holds all of its part.

        Args:
            name: in the checkpoint.
            tensor: the part, of any strides.
            part: which elements of the whole tensor it is.
            deal: which ranks hold the same part.
        """
        tensor = tensor.detach()
        dense = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
        is_dense, reach = True, 1
        for step, size in dense:
            is_dense, reach = is_dense and step == reach, reach * size
        if is_dense:
            return cls(name, part, deal, 0, flat_of(tensor))
        part = Part(part.shape, part.dim, part.rows)
        return cls(name, part, deal, 0, tensor.contiguous().view(-1), tensor)

    def mine(self, rank: int) -> tuple[int, torch.Tensor] | None:
        """Return what of it this rank writes, and from where on; None: others do."""
        run = self.deal.run_of(rank, self.start, self.start + self.flat.numel(), self.part.numel)
        return None if run is None else (run[0], self.flat[run[0] - self.start : run[1] - self.start])

    @torch.no_grad()
    def fill(self, source: StateSource) -> None:
        """Take its elements from a checkpoint.

        Raises:
            CheckpointError: where that has none of them, or another shape.
        """
        saved = expected(source, self.name, self.part.shape)
        kind, flat = torch_formats()[saved.dtype], self.flat
        if not flat.numel():
            return
        if flat.dtype == kind and flat.device.type == "cpu" and flat.is_contiguous():
            source.read(self.name, self.part, self.start, flat.view(torch.uint8).numpy().data)
            torch.autograd.graph.increment_version(flat)
            self._bring_home()
            return
        for first in range(0, flat.numel(), _AT_ONCE):
            target = flat[first : first + _AT_ONCE]
            staged = torch.empty(target.numel(), dtype=kind)
            source.read(self.name, self.part, self.start + first, staged.view(torch.uint8).numpy().data)
            target.copy_(staged)
        self._bring_home()

    def _bring_home(self) -> None:
        if self.home is not None:
            self.home.copy_(self.flat.view(self.home.shape))


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A run of a part's line, for optimizers that ask where it lies. name: in checkpoints. start: its first element."""

    name: str
    part: Part
    start: int
    device: torch.device

    def positions(self, first: int, last: int) -> torch.Tensor:
        """Return where elements of the run lie in the whole tensor, counted in the order of its memory: int64."""
        part = self.part
        line = torch.arange(self.start + first, self.start + last, device=self.device)
        if part.rows is None:
            return line
        order, local = part.order or tuple(range(len(part.shape))), part.local_shape
        inner = math.prod(local[dim] for dim in order[order.index(part.dim) + 1 :])
        row = line // inner % local[part.dim]
        if len(part.rows) == 1:
            there = row + part.rows[0][0]
        else:
            there = torch.tensor([one for rows in part.rows for one in range(*rows)], device=line.device)[row]
        return (line // (inner * local[part.dim]) * part.shape[part.dim] + there) * inner + line % inner


def tell_places(optimizer: torch.optim.Optimizer, held: Iterable[tuple[nn.Parameter, PlacedPart]]) -> None:
    """Tell an optimizer that asks for it, by a dict `places`, where what it updates lies in whole parameters."""
    places = getattr(optimizer, "places", None)
    if isinstance(places, dict):
        places.clear()
        places.update(held)


def expected(source: StateSource, name: str, shape: tuple[int, ...]) -> SavedTensor:
    """What a checkpoint has under that name. CheckpointError where it has nothing, or another shape."""
    saved = source.entries.get(name)
    if saved is None:
        raise CheckpointError(
            f"tensor {name!r}: the checkpoint lacks it. Load the checkpoint into the model it was saved from."
        )
    if tuple(saved.shape) != tuple(shape):
        raise CheckpointError(
            f"tensor {name!r}: {tuple(saved.shape)} in the checkpoint, {tuple(shape)} in the model. "
            f"Load the checkpoint into the model it was saved from."
        )
    return saved


def read_whole(source: StateSource, name: str) -> torch.Tensor:
    """Return a tensor as it was saved, on the host."""
    saved = source.entries[name]
    found = torch.empty(saved.shape, dtype=torch_formats()[saved.dtype])
    if found.numel():
        source.read(name, Part(tuple(saved.shape)), 0, found.view(-1).view(torch.uint8).numpy().data)
    return found


def flat_of(tensor: torch.Tensor, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return a dense tensor's elements in the order of its memory, or in that of `stride`, which may take a copy."""
    if stride is not None and stride != tensor.stride() and tensor.numel():
        like = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = like.copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def filled(full_name: str, like: Stretch, piece: torch.Tensor, source: StateSource) -> torch.Tensor:
    """Return a state of a piece, in the saved format, from a checkpoint.

    Args:
        full_name: of the state in the checkpoint, `parameter/key`.
        like: where the piece lies in the whole parameter.
        piece: the parameter's piece on this rank; the state has its shape.
        source: the checkpoint.
    """
    target = torch.empty_like(piece, dtype=torch_formats()[source.entries[full_name].dtype], requires_grad=False)
    Stretch(full_name, like.part, like.deal, like.start, flat_of(target)).fill(source)
    return target


def alone(name: str, value: torch.Tensor, rank: int) -> Stretch:
    """Return the stretch of a tensor that is shaped as no parameter, which one of the ranks that have it writes whole.

    Args:
        name: in the checkpoint.
        value: the same on all ranks.
        rank: the one that writes it.
    """
    value = value.detach().contiguous()
    return Stretch(name, Part(tuple(value.shape)), Deal.to_one(rank, value.numel()), 0, value.view(-1))
