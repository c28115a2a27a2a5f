"""What a rank without items must know to call an encoder as the others do: one item of theirs, without its numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm import all_gather
from weft.errors import LayoutError
from weft.mesh import Axis
from weft.parallel.layers.spread.items import Items
from weft.private_torch import tree_flatten

#: Whole numbers of an item that are told; of floats the shape is.
_MOST_NUMBERS = 1024


@dataclass(frozen=True)
class ToldCalls:
    """How others call an encoder, with one item of zeros. method: of the model's, which calls it; "": nothing does.

    outer: what that method is given; where there is none, the encoder. inner: what the encoder is given.
    """

    method: str
    outer: Items
    inner: Items


def told(path: str, method: str, outer: Items, inner: Items, chosen: int) -> bytes:
    """Return what `read_told` makes calls of.

    Args:
        path: of the encoder, for errors.
        method: as in `ToldCalls`.
        outer: what is given to it.
        inner: what is given to the encoder.
        chosen: which of the items is told.

    Raises:
        LayoutError: where a call has arguments that cannot be told.
    """
    return json.dumps([method, _told_call(path, outer, chosen), _told_call(path, inner, chosen)]).encode()


def read_told(text: bytes, device: torch.device) -> ToldCalls:
    """Return the calls that another rank told."""
    method, outer, inner = json.loads(text)
    return ToldCalls(method, _made_call(outer, device), _made_call(inner, device))


def _told_call(path: str, items: Items, chosen: int) -> list[Any]:
    """The call with one of its items.

    Args:
        path: of the module, for errors.
        items: of the call.
        chosen: which of them.

    Raises:
        LayoutError: where the call has arguments that cannot be told.
    """
    args, kwargs = items.arguments({})
    if len(args) + len(kwargs) != len(items.leaves):
        raise LayoutError(
            f"{path}=spread: it is called with tensors inside of other arguments, which ranks without items cannot be "
            "told. Call it with tensors and plain values, or use a plan without zero=3 and spread without :data."
        )
    said = [_said(path, leaf if not _is_divided(items, place) else items.taken(place, [chosen]))
            for place, leaf in enumerate(items.leaves)]  # fmt: skip
    named = dict(zip(kwargs, said[len(args) :], strict=True))
    sizes = items.rows[chosen], items.spans[chosen]
    return [said[: len(args)], named, sizes, items.by_row, items.by_item]


def _made_call(text: list[Any], device: torch.device) -> Items:
    """A call with one item of zeros."""
    said, named, (rows, span), by_row, by_item = text
    args = tuple(_made(one, device) for one in said)
    kwargs = {name: _made(one, device) for name, one in named.items()}
    leaves, tree = tree_flatten((args, kwargs))
    return Items((rows,), (span,), tuple(leaves), tree, tuple(by_row), tuple(by_item))


def first_told(own: bytes, sizes: list[int], axis: Axis, device: torch.device) -> bytes:
    """Return what the first rank that has something says. A collective.

    Args:
        own: what this rank says; b"": nothing.
        sizes: how many bytes each rank of the axis says.
        axis: the ranks.
        device: of the tensors that travel.
    """
    filled = torch.zeros(max(sizes), dtype=torch.uint8)
    filled[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else filled[:0]
    every = all_gather(filled.to(device), axis).view(axis.size, -1).cpu()
    speaker = next(rank for rank, size in enumerate(sizes) if size)
    return bytes(every[speaker, : sizes[speaker]].tolist())


def _is_divided(items: Items, place: int) -> bool:
    return place in items.by_row or place in items.by_item


def _said(path: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        numbers = None if value.is_floating_point() or value.numel() > _MOST_NUMBERS else value.tolist()
        return [str(value.dtype).removeprefix("torch."), list(value.shape), numbers]
    if value is None or isinstance(value, bool | int | float | str):
        return {"is": value}
    raise LayoutError(
        f"{path}=spread: it is called with a {type(value).__name__}, which ranks without items cannot be told. Call it "
        "with tensors and plain values, or use a plan without zero=3 and spread without :data."
    )


def _made(said: Any, device: torch.device) -> Any:
    if isinstance(said, dict):
        return said["is"]
    dtype, shape, numbers = getattr(torch, said[0]), said[1], said[2]
    if numbers is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, device=device).view(shape)
