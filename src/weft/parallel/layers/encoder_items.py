"""Encoder attention over all images of a batch in one call, and the items (images) of an encoder call.

Some encoders in transformers (Qwen2-VL and related models) call torch's fused attention once per image and layer, and
copy the image boundaries from the device each time. transformers passes the boundaries to a single call only
if the attention function's name contains "flash". So the encoder's modules get a copy of the config with such a name.
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

#: transformers passes boundaries to functions with "flash" in their names.
_NAME = "weft_flash_by_borders"
_BORDERS = "cu_seqlens"


def attend_by_borders(model: nn.Module) -> None:
    """Make encoders of a transformers model compute the attention of all images in one call.

    Replaces their configs by copies. Does nothing if no encoder calls attention once per image, or if a text module
    shares the config.
    """
    if not hugging_face.is_hugging_face(model):
        return
    attending = [module for module in model.modules() if _calls_by_picture(module)]
    if not attending:
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    configs: dict[int, Any] = {id(module.config): module.config for module in attending}
    sharing = [module for module in model.modules() if id(getattr(module, "config", None)) in configs]
    if any("attention_mask" in inspect.signature(module.forward).parameters for module in sharing):
        return  # a text module shares the config, and its attention takes no boundaries
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attend)
    for one in configs.values():
        own = copy.copy(one)
        own._attn_implementation_internal = _NAME
        for module in sharing:
            if getattr(module, "config", None) is one:
                module.config = own


def _calls_by_picture(module: nn.Module) -> bool:
    """Return True if the module attends within each image with torch's fused attention, without dropout."""
    if hugging_face.attention_name(module) != "sdpa" or not hasattr(module, "scaling"):
        return False
    drops = getattr(module, "attention_dropout", 0.0)
    return _BORDERS in inspect.signature(module.forward).parameters and not drops


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None, is_causal: bool | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return (attention, None), as transformers' attention functions: (1, H, P, C) in, (1, P, H, C) out.

    Tokens attend within their image. This calls torch's fused attention if there are no boundaries, if query and key
    have different numbers of heads, or if attention is causal or has dropout.
    """
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


# Items of one encoder call: images or clips. Each is one row, or several consecutive rows.

#: Possible lengths of a grid row: (height, width) or (frames, height, width).
_GRIDS = (2, 3)


@dataclass(frozen=True)
class Items:
    """Arguments of one encoder call, split into items (images or clips).

    Attributes:
        rows: number of rows of each item.
        spans: number of rows of each item that attend to each other.
        leaves, tree: the flattened arguments.
        by_row, by_item: indices of leaves with one entry per row or per item.
    """

    rows: tuple[int, ...]
    spans: tuple[int, ...]
    leaves: tuple[Any, ...]
    tree: Any
    by_row: tuple[int, ...]
    by_item: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def sizes(self, place: int) -> tuple[int, ...]:
        """Return the number of rows of each item in a leaf. place: the leaf's index."""
        return self.rows if place in self.by_row else (1,) * len(self.rows)

    @property
    def without_any(self) -> Items:
        places = {*self.by_row, *self.by_item}
        leaves = tuple(leaf[:0] if place in places else leaf for place, leaf in enumerate(self.leaves))
        return Items((), (), leaves, self.tree, self.by_row, self.by_item)

    def taken(self, place: int, chosen: Sequence[int]) -> Tensor:
        """Return the rows of the chosen items in the leaf with index `place`, concatenated."""
        return take(self.leaves[place], self.sizes(place), chosen)

    def arguments(self, replaced: dict[int, Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with some of the leaves replaced."""
        return tree_unflatten([replaced.get(place, leaf) for place, leaf in enumerate(self.leaves)], self.tree)


def take(tensor: Tensor, sizes: Sequence[int], chosen: Sequence[int]) -> Tensor:
    """Return the rows of the chosen items, concatenated.

    tensor: (rows of all items, ...). sizes: rows of each item. chosen: item indices, in output order.
    """
    if list(chosen) == list(range(len(sizes))):
        return tensor
    if all(size == 1 for size in sizes):
        return tensor.index_select(0, torch.tensor(list(chosen), dtype=torch.int64, device=tensor.device))
    parts = tensor.split(list(sizes))
    return torch.cat([parts[one] for one in chosen]) if chosen else tensor[:0]


def find_items(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Items:
    """Return the items of a call.

    An integer tensor can define how many rows of the first float tensor belong to each item: (N, 3) grids of frames,
    height and width, (N, 2) grids of height and width, or (N,) counts. The items must add up to the number of rows.
    Without such a tensor each row is one item. Raises LayoutError if the boundaries of items cannot be determined.
    """
    leaves, tree = tree_flatten((args, kwargs))
    tensors = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    main = next((place for place, leaf in tensors.items() if leaf.is_floating_point()), None)
    if main is None:
        raise LayoutError(
            f"{path}=spread: it is called without a floating-point tensor. Use spread for a module that reads items."
        )
    total = tensors[main].shape[0]
    whole = {place: leaf for place, leaf in tensors.items() if not leaf.is_floating_point()}
    told = next((found for place, leaf in whole.items() if (found := _counts(leaf, total)) is not None), None)
    if told is None and tensors[main].dim() < 3:
        shape = tuple(tensors[main].shape)
        raise LayoutError(
            f"{path}=spread: of its input of shape {shape} the rows of each item are unknown. Call it with integers "
            "for the number of rows of each, such as grid_thw, or with a row for each item, (items, ..., ...)."
        )
    rows, spans = told or ((1,) * total, (1,) * total)
    by_row = tuple(place for place, leaf in tensors.items() if leaf.shape[0] == total)
    by_item = tuple(place for place, leaf in tensors.items() if place not in by_row and leaf.shape[0] == len(rows))
    if told and len(rows) == total:  # every item is one row
        by_row, by_item = (*by_row, *by_item), ()
    return Items(rows, spans, tuple(leaves), tree, by_row, by_item)


def _counts(leaf: Tensor, total: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return rows and attending rows per item, or None if `leaf` does not give them for `total` rows."""
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


# Distribution of one call's items over ranks, and their exchange.


@dataclass(frozen=True, slots=True)
class Ranks:
    """Axes over which items are distributed. `data` has size 1 if items stay with their data rank."""

    data: Axis
    tp: Axis

    @property
    def per_home(self) -> int:
        return self.tp.size

    @property
    def batch_index(self) -> int:
        """This rank's index among the ranks with the same batch."""
        return self.tp.rank


@dataclass(frozen=True)
class Division:
    """Assignment of one call's items to ranks.

    Attributes:
        ranks: axes that share the items.
        rows: rows of each item of all data ranks, in data rank order.
        homes: each item's data rank.
        dealt: items of each rank.
    """

    ranks: Ranks
    rows: tuple[int, ...]
    homes: tuple[int, ...]
    dealt: list[list[int]]

    @cached_property
    def own(self) -> list[int]:
        return self.dealt[self.ranks.data.rank * self.ranks.per_home + self.ranks.batch_index]

    @cached_property
    def _first(self) -> int:
        return sum(home < self.ranks.data.rank for home in self.homes)

    def _at(self, data_rank: int, place: int, home: int) -> list[int]:
        return [item for item in self.dealt[data_rank * self.ranks.per_home + place] if self.homes[item] == home]

    @cached_property
    def _sent(self) -> list[list[int]]:
        """Items of this data rank that ranks with this rank's tp index compute, listed by data rank."""
        data, place = self.ranks.data, self.ranks.batch_index
        return [self._at(rank, place, data.rank) for rank in range(data.size)]

    @cached_property
    def _received(self) -> list[list[int]]:
        """Items that this rank computes, listed by the data rank whose batch contains them."""
        data, place = self.ranks.data, self.ranks.batch_index
        return [self._at(data.rank, place, home) for home in range(data.size)]

    def bring(self, items: Items, place: int) -> Tensor:
        """Return the rows of the leaf with index `place` for the items that this rank computes. Collective over `data`.

        items: items of this rank's batch.
        """
        leaf, sizes = items.leaves[place], items.sizes(place)
        if self.ranks.data.size == 1:
            return take(leaf, sizes, self.own)
        chosen = [item - self._first for part in self._sent for item in part]
        every = self.rows if place in items.by_row else (1,) * len(self.rows)
        return self._exchanged(take(leaf, sizes, chosen), every, self._sent, self._received)

    def _exchanged(
        self, rows: Tensor, sizes: Sequence[int], sent: list[list[int]], received: list[list[int]]
    ) -> Tensor:
        """Send rows of items to the data ranks that need them. Return those for this rank. sizes: rows per item."""
        data, place = self.ranks.data, self.ranks.batch_index
        send, receive = ([sum(sizes[item] for item in part) for part in parts] for parts in (sent, received))
        every = (self._at(rank, place, home) for rank in range(data.size) for home in range(data.size))
        most = max(sum(sizes[item] for item in part) for part in every)
        return exchange(rows.contiguous(), data, send, receive, most)

    def home(self, outputs: Sequence[Tensor], given: int) -> list[Tensor]:
        """Return the rows of all items of this data rank in the module's outputs, in item order.

        Collective over `data`, then over tp. outputs: each (rows, ...). The number of rows equals the number of input
        rows, or a multiple or fraction of it. given: number of input rows, of this rank's items or of the placeholder
        item. Raises LayoutError if the number of output rows per item is not an integer.
        """
        scaled = [self._rows_of(output.shape[0], given) for output in outputs]
        if not self.own:
            outputs = [output[:0] for output in outputs]
        if self.ranks.data.size > 1:
            outputs = self._over_data(outputs, scaled)
        return [self._joined(output, rows) for output, rows in zip(outputs, scaled, strict=True)]

    def _rows_of(self, made: int, given: int) -> list[int]:
        if not given or any(rows * made % given for rows in self.rows):
            raise LayoutError(
                f"spread: of {given} rows of items the module made {made}, so the rows of each item are unknown. Use "
                "a module with the same number of output rows for each row, or leave spread out."
            )
        return [rows * made // given for rows in self.rows]

    def _over_data(self, outputs: Sequence[Tensor], scaled: list[list[int]]) -> list[Tensor]:
        """Send all outputs to their data ranks in one exchange per dtype, so that the order of backward is fixed."""
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
        """Gather the rows from all ranks with this batch, in item order."""
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


# Description of an encoder call for ranks without items: one item of another rank, with zeros for its float values.

#: Maximum number of integers that are sent with their values. For floats only the shape is sent.
_MOST_NUMBERS = 1024


@dataclass(frozen=True)
class ReplicatedCalls:
    """Another rank's call to an encoder, with a single item. Floating-point tensors contain zeros.

    Attributes:
        method: the model's method that calls the encoder, or "".
        outer: the method's arguments, or the encoder's if there is no method.
        inner: the encoder's arguments.
    """

    method: str
    outer: Items
    inner: Items


def encode_calls(path: str, method: str, outer: Items, inner: Items, chosen: int) -> bytes:
    """Encode a call for `parse_calls`. Raises LayoutError if an argument of the call cannot be encoded.

    path: the encoder's path, for errors. method, outer, inner: as in `ReplicatedCalls`. chosen: index of the item to
    send.
    """
    return json.dumps([method, _recorded_call(path, outer, chosen), _recorded_call(path, inner, chosen)]).encode()


def parse_calls(text: bytes, device: torch.device) -> ReplicatedCalls:
    method, outer, inner = json.loads(text)
    return ReplicatedCalls(method, _made_call(outer, device), _made_call(inner, device))


def _recorded_call(path: str, items: Items, chosen: int) -> list[Any]:
    args, kwargs = items.arguments({})
    if len(args) + len(kwargs) != len(items.leaves):
        raise LayoutError(
            f"{path}=spread: it is called with tensors inside other arguments, which cannot be sent to ranks "
            "without items. Call it with tensors and plain values, or use a plan without zero=3 and spread without "
            ":data."
        )
    said = [_to_json(path, items.taken(place, [chosen]) if place in (*items.by_row, *items.by_item) else leaf)
            for place, leaf in enumerate(items.leaves)]  # fmt: skip
    named = dict(zip(kwargs, said[len(args) :], strict=True))
    sizes = items.rows[chosen], items.spans[chosen]
    return [said[: len(args)], named, sizes, items.by_row, items.by_item]


def _made_call(text: list[Any], device: torch.device) -> Items:
    said, named, (rows, span), by_row, by_item = text
    args = tuple(_made(one, device) for one in said)
    kwargs = {name: _made(one, device) for name, one in named.items()}
    leaves, tree = tree_flatten((args, kwargs))
    return Items((rows,), (span,), tuple(leaves), tree, tuple(by_row), tuple(by_item))


def first_recorded(own: bytes, sizes: list[int], axis: Axis, device: torch.device) -> bytes:
    """Return the message of the first rank whose message is not empty. All ranks must call it.

    sizes: message size of each rank of the axis, in bytes.
    """
    filled = torch.zeros(max(sizes), dtype=torch.uint8)
    filled[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else filled[:0]
    every = all_gather(filled.to(device), axis).view(axis.size, -1).cpu()
    speaker = next(rank for rank, size in enumerate(sizes) if size)
    return bytes(every[speaker, : sizes[speaker]].tolist())


def _to_json(path: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        numbers = None if value.is_floating_point() or value.numel() > _MOST_NUMBERS else value.tolist()
        return [str(value.dtype).removeprefix("torch."), list(value.shape), numbers]
    if value is None or isinstance(value, bool | int | float | str):
        return {"is": value}
    raise LayoutError(
        f"{path}=spread: it is called with a {type(value).__name__}, which cannot be sent to ranks without items. "
        "Call it with tensors and plain values, or use a plan without zero=3 and spread without :data."
    )


def _made(said: Any, device: torch.device) -> Any:
    if isinstance(said, dict):
        return said["is"]
    dtype, shape, numbers = getattr(torch, said[0]), said[1], said[2]
    if numbers is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, device=device).view(shape)


# Gathering of features after an encoder: all items are gathered immediately, or each output when it is read.


class ZeroGradDependency(Function):
    """Identity on the first tensor. The others get zero gradients, so that their backward runs."""

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
    """State of one call between its pre-hook and its hook.

    `given` is the number of input rows that the module got. `expected` is the number of input rows that the caller
    passed, if it passed a placeholder item because this rank's model did not call the module; else 0.
    """

    division: Division
    given: int
    expected: int

    def home(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the rows of this data rank's items in the module's outputs. Collective.

        For a placeholder item, the rows are zeros whose backward runs the module's backward.
        """
        found = self.division.home(outputs, self.given)
        if not self.expected:
            return found
        rows = (output.shape[0] * self.expected // self.given for output in outputs)
        zeros = (output.new_zeros(count, *output.shape[1:]) for count, output in zip(rows, outputs, strict=True))
        return [ZeroGradDependency.apply(zero, one) for zero, one in zip(zeros, found, strict=True)]


def lists_of_states(output: Any) -> dict[str, tuple[Tensor, ...]]:
    """Return the entries of a dict output that hold one tensor per layer. Most models read few of these tensors."""
    if not isinstance(output, dict):
        return {}
    return {
        name: value
        for name, value in output.items()
        if isinstance(value, tuple) and len(value) > 1 and all(isinstance(one, Tensor) for one in value)
    }


class HomeOnDemand(tuple[Any, ...]):
    """Tuple of tensors, each gathered when it is first read. All ranks that share items must read the same ones."""

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
