"""Attention of encoders that take pictures one after another, in one call for all pictures of a batch.

Models of transformers with such an encoder (Qwen2-VL and its kin) call torch's fused attention once for each picture in
each layer, and ask the device for the borders each time. Only a function whose name has "flash" in it gets the borders
in one call; so the encoder's modules get a config of their own, with the name of one that takes them.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.autograd import exchange, gather_slice
from weft.comm.collectives import all_gather
from weft.comm.mesh import Axis
from weft.errors import LayoutError
from weft.models.attention import bordered_attention
from weft.models.inspect import hugging_face
from weft.private_torch import Function, tree_flatten, tree_unflatten

#: transformers gives borders to functions with "flash" in their names.
_NAME = "weft_flash_by_borders"
_BORDERS = "cu_seqlens"


def attend_by_borders(model: nn.Module) -> None:
    """Let the encoders of a model of transformers attend to all pictures in one call, in place."""
    if not hugging_face.is_hugging_face(model):
        return
    attending = [module for module in model.modules() if _calls_by_picture(module)]
    if not attending:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    configs: dict[int, Any] = {id(module.config): module.config for module in attending}
    sharing = [module for module in model.modules() if id(getattr(module, "config", None)) in configs]
    if any("attention_mask" in inspect.signature(module.forward).parameters for module in sharing):
        return  # a part of the text has the same config, and its attention wants no borders
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    for one in configs.values():
        own = copy.copy(one)
        own._attn_implementation_internal = _NAME
        for module in sharing:
            if getattr(module, "config", None) is one:
                module.config = own


def _calls_by_picture(module: nn.Module) -> bool:
    """Whether it attends to the rows between borders, by torch's fused attention, and drops nothing."""
    if hugging_face.attention_name(module) != "sdpa" or not hasattr(module, "scaling"):
        return False
    drops = getattr(module, "attention_dropout", 0.0)
    return _BORDERS in inspect.signature(module.forward).parameters and not drops


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """An attention function in the manner of transformers: (1, H, P, C) in, (1, P, H, C) out."""
    usual = query.shape[-1] ** -0.5
    if cu_seq_lens_q is None or query.shape[1] != key.shape[1] or is_causal or dropout:
        own = hugging_face.attention_function(module, "sdpa")
        return own(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, is_causal=is_causal, **kwargs
        )
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    longest = int(max_length_q) if max_length_q is not None else query.shape[2]
    starts = cu_seq_lens_q[:-1].to(torch.int64)[None]
    return bordered_attention(query, key, value, starts, longest).transpose(1, 2), None


# The items of one call of an encoder: pictures or clips, each a row, or unlike many rows one after another.

#: Numbers of the rows of an item: frames, height and width, or height and width.
_GRIDS = (2, 3)


@dataclass(frozen=True)
class Items:
    """What an encoder was called with.

    rows: of each item in tensors whose rows are no items. spans: how many of them attend to each other. leaves, tree:
    the arguments. by_row, by_item: which of the leaves have a row for each of `rows`, or for each item.
    """

    rows: tuple[int, ...]
    spans: tuple[int, ...]
    leaves: tuple[Any, ...]
    tree: Any
    by_row: tuple[int, ...]
    by_item: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def are_rows(self) -> bool:
        """Whether each item is one row."""
        return all(count == 1 for count in self.rows)

    def sizes(self, place: int) -> tuple[int, ...]:
        """Return how many rows each item has in a leaf."""
        return self.rows if place in self.by_row else (1,) * len(self.rows)

    @property
    def without_any(self) -> Items:
        """The same call without an item."""
        places = {*self.by_row, *self.by_item}
        leaves = tuple(leaf[:0] if place in places else leaf for place, leaf in enumerate(self.leaves))
        return Items((), (), leaves, self.tree, self.by_row, self.by_item)

    def taken(self, place: int, chosen: Sequence[int]) -> Tensor:
        """Return the rows of some items in a leaf, one item after another."""
        return take(self.leaves[place], self.sizes(place), chosen)

    def arguments(self, replaced: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and named arguments with some of the leaves replaced."""
        return tree_unflatten([replaced.get(place, leaf) for place, leaf in enumerate(self.leaves)], self.tree)


def take(tensor: Tensor, sizes: Sequence[int], chosen: Sequence[int]) -> Tensor:
    """Return the rows of some items, one after another.

    Args:
        tensor: (rows of all items, ...).
        sizes: rows of each item.
        chosen: numbers of items, in the order wanted.
    """
    if list(chosen) == list(range(len(sizes))):
        return tensor
    if all(size == 1 for size in sizes):
        return tensor.index_select(0, torch.tensor(list(chosen), dtype=torch.int64, device=tensor.device))
    parts = tensor.split(list(sizes))
    return torch.cat([parts[one] for one in chosen]) if chosen else tensor[:0]


def find_items(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Items:
    """Return the items of a call. Of the first tensor of floats each row is one, or whole numbers tell their borders.

    Whole numbers tell borders where there are as many as rows: (N, 3) grids of frames, height and width, (N, 2) of
    height and width, or (N,) counts.

    Args:
        path: of the module, for errors.
        args: positional arguments.
        kwargs: named ones.

    Raises:
        LayoutError: where the borders of items cannot be told.
    """
    leaves, tree = tree_flatten((args, kwargs))
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    main = next((place for place, leaf in tensors.items() if leaf.is_floating_point()), None)
    if main is None:
        raise LayoutError(f"{path}=spread: it is called without a tensor of numbers. Spread a module that reads items.")
    total = tensors[main].shape[0]
    whole = {place: leaf for place, leaf in tensors.items() if not leaf.is_floating_point()}
    told = next((found for place, leaf in whole.items() if (found := _counts(leaf, total)) is not None), None)
    if told is None and tensors[main].dim() < 3:
        shape = tuple(tensors[main].shape)
        raise LayoutError(
            f"{path}=spread: of its input of shape {shape} Weft cannot tell which rows are one item. Call it with "
            "whole numbers that say how many rows each has, such as grid_thw, or with a row for each item, "
            "(items, ..., ...)."
        )
    rows, spans = told or ((1,) * total, (1,) * total)
    by_row = tuple(place for place, leaf in tensors.items() if leaf.shape[0] == total)
    by_item = tuple(place for place, leaf in tensors.items() if place not in by_row and leaf.shape[0] == len(rows))
    if told and len(rows) == total:  # every item is one row
        by_row, by_item = (*by_row, *by_item), ()
    return Items(rows, spans, tuple(leaves), tree, by_row, by_item)


def _counts(leaf: Tensor, total: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Rows of each item, and how many of them attend to each other; None where the numbers do not say that."""
    if leaf.dtype == torch.bool or leaf.is_meta:
        return None
    if leaf.dim() == 1 and leaf.shape[0] <= total:
        rows = tuple(leaf.tolist())
        return (rows, rows) if sum(rows) == total and min(rows, default=0) >= 0 else None
    if leaf.dim() == 2 and leaf.shape[1] in _GRIDS and leaf.shape[0] <= total:
        grids: list[list[int]] = leaf.tolist()
        spans = tuple(grid[-1] * grid[-2] for grid in grids)
        rows = tuple(span * (grid[0] if len(grid) == 3 else 1) for span, grid in zip(spans, grids, strict=True))
        return (rows, spans) if sum(rows) == total else None
    return None


# How the items of one call lie over ranks: which are this rank's, and the ways there and home.


@dataclass(frozen=True, slots=True)
class Ranks:
    """The axes that share items. data: of size 1 where items stay with their data rank."""

    data: Axis
    tp: Axis

    @property
    def per_home(self) -> int:
        """Ranks that hold the same batch."""
        return self.tp.size

    @property
    def place(self) -> int:
        """This rank's place among them."""
        return self.tp.rank


@dataclass(frozen=True)
class Division:
    """One call's items over ranks.

    ranks: that share. rows: of each item of all data ranks, in order of these. homes: each item's data rank. dealt: the
    items of each rank.
    """

    ranks: Ranks
    rows: tuple[int, ...]
    homes: tuple[int, ...]
    dealt: list[list[int]]

    @cached_property
    def own(self) -> list[int]:
        """Items that this rank computes."""
        return self.dealt[self.ranks.data.rank * self.ranks.per_home + self.ranks.place]

    @cached_property
    def _first(self) -> int:
        """Number of this data rank's first item."""
        return sum(home < self.ranks.data.rank for home in self.homes)

    def _at(self, data_rank: int, place: int, home: int) -> list[int]:
        """Items of a home that a rank computes."""
        return [item for item in self.dealt[data_rank * self.ranks.per_home + place] if self.homes[item] == home]

    @cached_property
    def _sent(self) -> list[list[int]]:
        """Of this data rank's items, those that each data rank computes on the rank in this one's place."""
        data, place = self.ranks.data, self.ranks.place
        return [self._at(rank, place, data.rank) for rank in range(data.size)]

    @cached_property
    def _received(self) -> list[list[int]]:
        """Of the items that this rank computes, those of each data rank."""
        data, place = self.ranks.data, self.ranks.place
        return [self._at(data.rank, place, home) for home in range(data.size)]

    def bring(self, items: Items, place: int) -> Tensor:
        """Return the rows of this rank's items in a leaf of the call. A collective over `data`."""
        leaf, sizes = items.leaves[place], items.sizes(place)
        if self.ranks.data.size == 1:
            return take(leaf, sizes, self.own)
        chosen = [item - self._first for part in self._sent for item in part]
        every = self.rows if place in items.by_row else (1,) * len(self.rows)
        return self._exchanged(take(leaf, sizes, chosen), every, self._sent, self._received)

    def _exchanged(
        self, rows: Tensor, sizes: Sequence[int], sent: list[list[int]], received: list[list[int]]
    ) -> Tensor:
        """Rows of items that other data ranks need, for those that this one needs. sizes: of each item."""
        data, place = self.ranks.data, self.ranks.place
        send, receive = ([sum(sizes[item] for item in part) for part in parts] for parts in (sent, received))
        every = (self._at(rank, place, home) for rank in range(data.size) for home in range(data.size))
        most = max(sum(sizes[item] for item in part) for part in every)
        return exchange(rows.contiguous(), data, send, receive, most)

    def home(self, outputs: Sequence[Tensor], given: int) -> list[Tensor]:
        """Return the rows of all items of this data rank in outputs of the module, in order of the items.

        A collective over `data`, then over tp.

        Args:
            outputs: each (rows, ...), as many as the module was given, or a multiple or share of so many.
            given: rows that the module was given: those of this rank's items, or of what stood in for them.
        """
        scaled = [self._rows_of(output.shape[0], given) for output in outputs]
        if not self.own:
            outputs = [output[:0] for output in outputs]
        if self.ranks.data.size > 1:
            outputs = self._over_data(outputs, scaled)
        return [self._joined(output, rows) for output, rows in zip(outputs, scaled, strict=True)]

    def _rows_of(self, made: int, given: int) -> list[int]:
        """Rows of every item in an output."""
        if not given or any(rows * made % given for rows in self.rows):
            raise LayoutError(
                f"spread: of {given} rows of items the module made {made}, and Weft cannot tell which are whose. "
                "Spread a module that gives as many rows for each row, or leave spread out."
            )
        return [rows * made // given for rows in self.rows]

    def _over_data(self, outputs: Sequence[Tensor], scaled: list[list[int]]) -> list[Tensor]:
        """Bring all outputs of one format home in one exchange, so that it has one place in backward."""
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(output.dtype for output in outputs):
            places = [place for place, output in enumerate(outputs) if output.dtype == dtype]
            parts = {
                place: outputs[place].split([sum(scaled[place][item] for item in own) for own in self._received])
                for place in places
            }
            widths = {place: prod(outputs[place].shape[1:]) for place in places}
            packed = [parts[place][rank].reshape(-1) for rank in range(self.ranks.data.size) for place in places]
            values = [sum(scaled[place][item] * widths[place] for place in places) for item in range(len(self.rows))]
            came = self._exchanged(torch.cat(packed), values, self._received, self._sent)
            lots = came.split(
                [sum(scaled[place][item] for item in own) * widths[place] for own in self._sent for place in places]
            )
            for index, place in enumerate(places):
                shape = (-1, *outputs[place].shape[1:])
                found[place] = torch.cat([lot.view(shape) for lot in lots[index :: len(places)]])
        return [found[place] for place in range(len(outputs))]

    def _joined(self, output: Tensor, rows: list[int]) -> Tensor:
        """The rows of all ranks that hold this batch, in the order of the items."""
        ranks, home = self.ranks, self.ranks.data.rank
        order = [
            [item for rank in range(ranks.data.size) for item in self._at(rank, place, home)]
            for place in range(ranks.per_home)
        ]
        counts = [sum(rows[item] for item in own) for own in order]
        most = max(counts)
        starts: dict[int, int] = {}
        for place, own in enumerate(order):
            start = place * most
            for item in own:
                starts[item], start = start, start + rows[item]
        if ranks.per_home > 1:
            missing = most - output.shape[0]
            filled = torch.cat([output, output.new_zeros((missing, *output.shape[1:]))]) if missing else output
            output = gather_slice(filled, ranks.tp, 0)
        places = [starts[item] + row for item in sorted(starts) for row in range(rows[item])]
        if places == list(range(output.shape[0])):
            return output
        return output.index_select(0, torch.tensor(places, dtype=torch.int64, device=output.device))


# What a rank without items must know to call an encoder as the others do: one item of theirs, without its numbers.

#: Whole numbers of an item that are told; of floats the shape is.
_MOST_NUMBERS = 1024


@dataclass(frozen=True)
class ReplicatedCalls:
    """How others call an encoder, with one item of zeros. method: of the model's, which calls it; "": nothing does.

    outer: what that method is given; where there is none, the encoder. inner: what the encoder is given.
    """

    method: str
    outer: Items
    inner: Items


def told(path: str, method: str, outer: Items, inner: Items, chosen: int) -> bytes:
    """Return what `parse_calls` makes calls of.

    Args:
        path: of the encoder, for errors.
        method: as in `ReplicatedCalls`.
        outer: what is given to it.
        inner: what is given to the encoder.
        chosen: which of the items is told.

    Raises:
        LayoutError: where a call has arguments that cannot be told.
    """
    return json.dumps([method, _recorded_call(path, outer, chosen), _recorded_call(path, inner, chosen)]).encode()


def parse_calls(text: bytes, device: torch.device) -> ReplicatedCalls:
    """Return the calls that another rank told."""
    method, outer, inner = json.loads(text)
    return ReplicatedCalls(method, _made_call(outer, device), _made_call(inner, device))


def _recorded_call(path: str, items: Items, chosen: int) -> list[Any]:
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


def first_recorded(own: bytes, sizes: list[int], axis: Axis, device: torch.device) -> bytes:
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


# The way of features from an encoder to its model: those of all items brought home, at once or when they are read.


class ZeroGradDependency(Function):
    """A tensor as it is; others have a gradient of zero from it, so that their backward takes place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return (grads[0], *zeros)


@dataclass(frozen=True)
class ItemCall:
    """One call, from the hook before it to the one behind.

    given: rows that the module got. expected: rows that who stands by passed to it, and waits for; 0: nobody does.
    """

    division: Division
    given: int
    expected: int

    def home(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the rows of this data rank's items in outputs of the module; for who stands by, zeros."""
        found = self.division.home(outputs, self.given)
        if not self.expected:
            return found
        rows = (output.shape[0] * self.expected // self.given for output in outputs)
        zeros = (output.new_zeros(count, *output.shape[1:]) for count, output in zip(rows, outputs, strict=True))
        return [ZeroGradDependency.apply(zero, one) for zero, one in zip(zeros, found, strict=True)]


def lists_of_states(output: Any) -> dict[str, tuple[Tensor, ...]]:
    """Of an output by name, entries with a tensor for each layer, of which models read few."""
    if not isinstance(output, dict):
        return {}
    return {
        name: value
        for name, value in output.items()
        if isinstance(value, tuple) and len(value) > 1 and all(isinstance(one, Tensor) for one in value)
    }


class HomeOnDemand(tuple[Any, ...]):
    """Tensors of which each is brought home when it is first read: all ranks that share items read the same."""

    def __new__(cls, parts: tuple[Tensor, ...], call: ItemCall) -> HomeOnDemand:
        found = super().__new__(cls, [None] * len(parts))
        found._parts, found._found, found._call = parts, {}, call
        return found

    _parts: tuple[Tensor, ...]
    _found: dict[int, Tensor]
    _call: ItemCall

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self[one] for one in range(*place.indices(len(self))))
        number = range(len(self))[place]
        if number not in self._found:
            [self._found[number]] = self._call.home([self._parts[number]])
        return self._found[number]

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))
