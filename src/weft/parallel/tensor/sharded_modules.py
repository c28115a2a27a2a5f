"""Sharded layers and their LoRA adapters: the shards of A and B on a rank, and the communication they need.

    layer                             A                        B, magnitude              communicated
    column-sharded                    replicated               its rows, as the weight   gradient of A x
    column-sharded, tokens sharded    replicated, partial sum  its rows                  A x of all tokens, its gradient
    row-sharded                       its inputs               replicated, partial sum   nothing: added before the sum

So the width of adapter communication is the adapter's rank. Under DoRA, the row-sharded layer also sums squares for the
norms.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.comm.autograd import copy_to, gather_from, scatter_sum, sum_over
from weft.comm.mesh import Axis
from weft.config.shapes.hugging_face_config import number
from weft.errors import ModelError
from weft.models.adapters import AdaptedLinear, SingleProcess
from weft.models.inspect import layers
from weft.models.inspect.counted_sizes import sizes_of
from weft.models.inspect.layers import Heads, WrittenHeads
from weft.models.inspect.rms_norm import RmsForm
from weft.parallel.layers.deferred_gradients import HoldingLayer, linear
from weft.parallel.layers.float8_products import Float8
from weft.parallel.random.streams import ShardPosition
from weft.parallel.tensor.linear import (
    TOKENS,
    Column,
    SharedLayer,
    columns,
    compiled_columns,
    compiled_row,
    row,
    row_sum,
    summed,
    token_share,
    with_padding,
    with_sequences,
    without_padding,
)
from weft.parallel.tensor.sequence import ShardedTokens


class ColumnAdapter(SingleProcess):
    """Adapter of a column-sharded layer whose full input is on each rank."""

    def __init__(self, axis: Axis, part: ShardPosition | None):
        self._axis, self._part = axis, part

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        return _dropped(dropout, x, self._part, is_whole=True)

    def into_weight(self, x: Tensor) -> Tensor:
        """Return x; backward sums its gradient over the ranks."""
        return copy_to(x, self._axis)

    def low(self, h: Tensor) -> Tensor:
        """Return h; backward sums its gradient over the ranks.

        The gradients of A and of the input are then full on each rank.
        """
        return copy_to(h, self._axis)


class TokenAdapter(SingleProcess):
    """Adapter of a column-sharded layer whose input tokens are sharded: it reads this rank's tokens.

    is_flat: True if the layer itself gets (batch * tokens, features).
    """

    def __init__(self, axis: Axis, part: ShardPosition | None, *, is_flat: bool = False):
        self._axis, self._part, self._is_flat = axis, part, is_flat

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        """Apply dropout to this rank's tokens."""
        if self._is_flat:
            return _dropped(dropout, x.flatten(0, 1), self._part, is_whole=False).view_as(x)
        return _dropped(dropout, x, self._part, is_whole=False)

    def into_weight(self, x: Tensor) -> Tensor:
        return self._all_tokens(x)

    def low(self, h: Tensor) -> Tensor:
        return self._all_tokens(h)

    def _all_tokens(self, x: Tensor) -> Tensor:
        found = gather_from(x, self._axis, TOKENS)
        return found.flatten(0, 1) if self._is_flat else found


class GatheredAdapter(SingleProcess):
    """Adapter of a column-sharded layer whose input is computed from gathered tokens.

    The backward of the gather sums the input's gradient over the ranks.
    """

    def __init__(self, part: ShardPosition | None):
        self._part = part

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        return _dropped(dropout, x, self._part, is_whole=True)


class RowAdapter(SingleProcess):
    """Adapter of a row-sharded layer: each rank's output is a summand of the sum over the ranks."""

    def __init__(self, axis: Axis, part: ShardPosition):
        self._axis, self._part = axis, part

    def drop(self, dropout: nn.Module, x: Tensor) -> Tensor:
        with self._part.at(is_open=True):
            return dropout(x)

    def squares(self, total_F: Tensor) -> Tensor:
        """Sum the squares over the ranks, because each rank has only some elements of every row of the weight."""
        return summed(total_F, self._axis)


def _dropped(dropout: nn.Module, x: Tensor, part: ShardPosition | None, *, is_whole: bool) -> Tensor:
    if part is None:
        return dropout(x)
    with part.at(is_open=False, is_whole=is_whole):
        return dropout(x)


# Layers that store a shard of their weight. A module gets a subclass of its class, so paths and names do not change.


class Entry:
    """Gathers the activations that column-sharded layers read.

    Attributes:
        members: column-sharded layers that read the activations.
        width: number of features of the activations.
        part: position of this rank, whose `is_open` is True from `enter` to the row-parallel layer; None for a head.
        is_compiled: True if the layers are compiled. Each then runs its matmul after one collective that can be traced.
        is_ahead: True if unsharded layers run first, and the members read their outputs.
    """

    def __init__(
        self,
        line: SharedLayer,
        width: int,
        part: ShardPosition | None,
        *,
        is_compiled: bool = False,
        is_ahead: bool = False,
    ):
        self.line, self.is_compiled, self.is_ahead, self.width = line, is_compiled, is_ahead, width
        self.part = part
        self.members: list[nn.Module] = []
        self._inner: torch.Tensor | None = None
        self._outer: torch.Tensor | None = None
        self._products: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    def enter(self, x: torch.Tensor, *, is_shared: bool = True) -> torch.Tensor:
        """Return all tokens of the activations x, possibly as `ShardedTokens`.

        Backward sums the gradient over the ranks, and keeps this rank's tokens if tokens are sharded. If `is_shared`,
        x may be stored until `close`, so that all members multiply it together.

        is_shared: True if only the members read the result.
        """
        if self.line.cuts_tokens and x.dim() < 3:
            x = with_sequences(x, self.part.sequences if self.part is not None else 0, self.line.axis)
            inner = self._gathered(x, is_shared, is_flat=True)
        elif self.line.cuts_tokens:
            inner = self._gathered(x, is_shared, is_flat=False)
            if self.part is not None:  # set again if only this block is recomputed
                self.part.sequences = x.shape[0]
        else:
            inner = copy_to(x, self.line.axis)
        if not is_shared:
            self.close()
        is_padded = self.line.cuts_tokens and self.part is not None and self.part.padding > 0
        if is_shared and not is_padded and not self.is_ahead and (self._in_chunks or not self.is_compiled):
            self._begin(inner, x)
        elif self.part is not None:
            self.part.is_open = True
        return inner

    @property
    def _in_chunks(self) -> bool:
        return self.line.cuts_tokens and self.line.pieces > 1

    def _gathered(self, x: torch.Tensor, is_shared: bool, *, is_flat: bool) -> torch.Tensor:
        """Return all tokens: a lazy tensor if members gather in chunks, outside compiled graphs and autocast.

        In a compiled graph, a gather whose result is not read is removed.
        """
        compiles = torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type)
        if self._in_chunks and is_shared and not self.is_ahead and not compiles:
            return ShardedTokens.of(x, self.line.axis, is_flat=is_flat)
        inner = gather_from(x, self.line.axis, TOKENS)
        inner = inner if self.part is None else without_padding(inner, self.part)
        return inner.flatten(0, 1) if is_flat else inner

    def product(self, member: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the member's output for x. Members that read the same tensor share one collective."""
        if self._in_chunks and x is self._inner and not torch.is_autocast_enabled(x.device.type):
            return self._piecewise(member)
        if self.is_ahead:
            return _linear(member, x)  # autograd tracks how it was computed from the input
        if self.is_compiled:
            if not self.line.cuts_tokens and x is not self._inner:
                self._begin(x, copy_to(x, self.line.axis))
            return _linear(member, x if self._outer is None else self._outer)
        if torch.is_autocast_enabled(x.device.type):
            return _linear(member, x if self.line.cuts_tokens else copy_to(x, self.line.axis))
        if not self.line.cuts_tokens and x is not self._inner:
            self._begin(x, x)
        if x is not self._inner or self._outer is None:
            return _linear(member, x)  # computed from the input, tracked by autograd
        if layers.is_packed(member):  # quantized weights are dequantized for one matmul only
            return _linear(member, x if self.line.cuts_tokens else copy_to(x, self.line.axis))
        outer = self._outer
        if not self._products:
            self._products = self._multiply(self.members, x, outer)
        product = self._products.pop(id(member), None)
        if not self._products:
            self.close()
        return self._multiply([member], x, outer)[id(member)] if product is None else product

    def _begin(self, inner: torch.Tensor, outer: torch.Tensor) -> None:
        self.close()
        self._inner, self._outer = inner, outer
        if self.part is not None:
            self.part.is_open = True

    def _multiply(
        self, members: list[nn.Module], inner: torch.Tensor | None, outer: torch.Tensor
    ) -> dict[int, torch.Tensor]:
        read = [
            Column(layers.stored_weight(one), layers.bias_of(one), layers.is_transposed(one), _form_of(one))
            for one in members
        ]
        made = columns(outer, inner, self.line, read, getattr(members[0], "_weft_held", None))
        return {id(one): product for one, product in zip(members, made, strict=True)}

    def _piecewise(self, member: nn.Module) -> torch.Tensor:
        """Return the member's output from one chunked computation of all members.

        Other outputs are stored by index, so that graphs of identical blocks are identical.
        """
        place, inner, outer = member._weft_place, self._inner, self._outer
        assert isinstance(place, int)
        assert inner is not None
        assert outer is not None
        if place not in self._made:
            is_flat = inner.dim() == 2
            found = self._all_members(outer)
            self._made = {at: out.flatten(0, 1) if is_flat else out for at, out in enumerate(found)}
        product = self._made.pop(place)
        if not self._made:
            self.close()
        return product

    def _all_members(self, outer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not torch.compiler.is_compiling():
            return tuple(self._multiply(self.members, None, outer).values())
        made = compiled_columns(outer, self.line, [layers.weight_of(one) for one in self.members])
        biases = [layers.bias_of(one) for one in self.members]
        return tuple(out if bias is None else out + bias for out, bias in zip(made, biases, strict=True))

    def for_adapter(self, x: torch.Tensor) -> tuple[torch.Tensor, SingleProcess]:
        """Return the input of a layer's adapter, and the communication that the adapter needs.

        The input is this rank's tokens if x is the result of gathering them in `enter`, else x.
        """
        if not self.line.cuts_tokens and not self.is_ahead:
            return x, ColumnAdapter(self.line.axis, self.part)
        if x is self._inner and self._outer is not None:
            return self._outer, TokenAdapter(self.line.axis, self.part, is_flat=x.dim() == 2)
        return x, GatheredAdapter(self.part)

    def close(self) -> None:
        """Drop the stored input, which must not stay alive longer than the module needs it."""
        self._inner = self._outer = None
        self._products, self._made = {}, {}


def _form_of(member: nn.Module) -> Float8 | None:
    return getattr(member, "_weft_float8", None)


def _linear(member: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the member's output, computed by operations that the compiler can trace."""
    bias, form = layers.bias_of(member), _form_of(member)
    if form is None:
        return layers.product(member, x, bias)
    return linear(x, layers.weight_of(member), bias, None, form=form)


class Enter:
    """Hooks of the module whose input an `Entry` gathers.

    Methods of an object are deep-copied with the module. Closures would be shared by the copies.

    ends: True if a row-parallel layer inside the module reduces the module's output. If False, as in BERT's pooler,
    outputs stay sharded until a later layer. second: indices and names of the arguments from which cross-attention
    computes keys and values.
    """

    def __init__(self, entry: Entry, ends: bool, second: tuple[tuple[int, str], ...] = ()):
        self._entry, self._ends, self._second = entry, ends, second

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather the tokens of the hidden states, and of an encoder's output for cross-attention.

        Raises ModelError if no argument has the features that the sharded layers read.
        """
        args, kwargs, has_second = self._second_entered(args, kwargs)
        values = [*args, *kwargs.values()]
        for place, value in enumerate(values):
            if (
                isinstance(value, torch.Tensor)
                and value.is_floating_point()
                and value.shape[-1:] == (self._entry.width,)
            ):
                values[place] = self._entry.enter(value, is_shared=not has_second)
                return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))
        raise ModelError(
            f"module of type {type(module).__name__}: none of its arguments has the {self._entry.width} features "
            "that its sharded layers read. Use sp=off, or set a layout without it."
        )

    def _second_entered(self, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], bool]:
        """Return the arguments with all tokens of an encoder's output gathered, and True if there is such an output."""
        for place, name in self._second if self._entry.line.cuts_tokens else ():
            if len(args) > place and args[place] is not None:
                return (
                    (*args[:place], self._entry.enter(args[place], is_shared=False), *args[place + 1 :]),
                    kwargs,
                    True,
                )
            if kwargs.get(name) is not None:
                return args, {**kwargs, name: self._entry.enter(kwargs[name], is_shared=False)}, True
        return args, kwargs, False

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Drop the stored input, and reset the position's `is_open` unless the outputs are still sharded."""
        del module, args, output
        self._entry.close()
        if self._ends and self._entry.part is not None:
            self._entry.part.is_open = False


class ColumnLinear(HoldingLayer):
    """Linear layer that computes this rank's share of the output features."""

    _weft_entry: Entry
    _weft_enters: bool
    _weft_place: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's output features (..., F) for inputs (..., D)."""
        entry = self._weft_entry
        x = entry.enter(x) if self._weft_enters else x
        if not isinstance(self, AdaptedLinear):
            return entry.product(self, x)
        read, line = entry.for_adapter(x)  # before the product, which may close the entry
        return self.adapt(entry.product(self, x), read, line)


class RowLinear(HoldingLayer):
    """Linear layer that reads this rank's share of the input features. Its output is the sum over the ranks."""

    _weft_line: SharedLayer
    _weft_part: ShardPosition
    _weft_is_compiled: bool = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs (..., D), summed over the ranks, for this rank's input features (..., F).

        If tokens are sharded, outputs are returned only for this rank's tokens.
        """
        self._weft_part.is_open = False
        weight, held = self.weight, self._weft_held
        line = self._weft_line
        if line.cuts_tokens and line.pieces > 1 and not torch.is_autocast_enabled(x.device.type):
            return self._piecewise(x)
        if held is not None and weight.dtype == x.dtype:
            product = linear(x, weight, None, held, transposed=layers.is_transposed(self), form=self._weft_float8)
        elif self._weft_float8 is not None:
            product = linear(x, layers.weight_of(self), None, None, form=self._weft_float8)
        else:
            product = layers.product(self, x)
        if isinstance(self, AdaptedLinear):  # its output is part of the sum over ranks
            product = self.adapt(product, x, RowAdapter(self._weft_line.axis, self._weft_part), has_bias=False)
        if is_flat := product.dim() == 2 and self._weft_line.cuts_tokens:
            product = with_sequences(product, self._weft_part.sequences, self._weft_line.axis)
        product = with_padding(product, self._weft_part) if line.cuts_tokens else product
        out = row_sum(product, self._weft_line, is_compiled=self._weft_is_compiled)
        out = out.flatten(0, 1) if is_flat else out
        return out if self.bias is None else out + self.bias

    def _piecewise(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply and reduce-scatter in chunks of tokens. The reduction of a chunk overlaps with the next matmul."""
        line, is_flat = self._weft_line, x.dim() == 2
        if is_flat:
            x = with_sequences(x, self._weft_part.sequences, line.axis)
        token_share(x.shape, line.axis)
        if torch.compiler.is_compiling():
            out = compiled_row(x, line, layers.weight_of(self))
        else:
            weight = layers.stored_weight(self)
            out = row(x, weight, line, self._weft_held, transposed=layers.is_transposed(self))
        out = out.flatten(0, 1) if is_flat else out
        return out if self.bias is None else out + self.bias


class ShardedNorm(nn.Module):
    """RMS norm over features that are sharded across ranks."""

    weight: nn.Parameter
    _weft_form: RmsForm
    _weft_axis: Axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x. The ranks all-reduce one number per token."""
        axis = self._weft_axis
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.square().mean(-1, keepdim=True) / axis.size
        # Every rank reads the sum, so its gradient is also a sum over the ranks.
        return self._weft_form.scaled(x, copy_to(sum_over(mean, axis), axis), self.weight)


class VocabEmbedding(nn.Embedding):
    """Embedding with this rank's rows of the table. Ids of other rows give zeros, and the ranks' outputs are summed.

    `replace_class` puts it after a subclass of nn.Embedding, whose own forward, such as a norm, then gets the sum.
    """

    weight: nn.Parameter
    _weft_line: SharedLayer

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride] - ids
        """Return the embeddings (B, T, D) of ids (B, T), or of this rank's tokens if the next layers shard them."""
        line, rows_here = self._weft_line, self.weight.shape[0]
        local_BT = ids_BT - line.axis.rank * rows_here
        elsewhere_BT = (local_BT < 0) | (local_BT >= rows_here)
        x_BTD = super().forward(local_BT.masked_fill(elsewhere_BT, 0))
        x_BTD = x_BTD.masked_fill(elsewhere_BT[..., None], 0.0)
        return scatter_sum(x_BTD, line.axis, TOKENS) if line.cuts_tokens else sum_over(x_BTD, line.axis)


class LocalHeads(nn.Module):
    """Module around sharded layers whose code contains the number or the width of all heads as constants."""

    _weft_written: WrittenHeads
    _weft_ranks: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original forward, with the number of this rank's heads in its reshapes and splits."""
        with _LocalSizes(self, self._weft_written, self._weft_ranks):
            return super().forward(*args, **kwargs)


class _LocalSizes(TorchFunctionMode):
    """Mode that replaces the sizes of all heads with this rank's sizes, for tensors with this rank's features."""

    def __init__(self, module: nn.Module, written: WrittenHeads, ranks: int):
        super().__init__()
        self._written, self._ranks = written, ranks
        self._outputs = {layer.out_features for layer in module.children() if isinstance(layer, ColumnLinear)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("view", "reshape") and (sizes := sizes_of(name, args, {})) is not None:
            local = self._written.local_sizes([int(size) for size in sizes], args[0].shape, self._ranks)
            args = args if local is None else (args[0], *local)
        elif name == "split" and len(args) > 1 and args[1] in self._written.totals:
            dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
            if args[0].shape[dim] in self._outputs:
                args = (args[0], args[1] // self._ranks, *args[2:])
        elif func is torch.Tensor.unflatten:  # equivalent; torch.compile cannot trace the method
            func = torch.unflatten
        return func(*args, **kwargs)


def localise(module: nn.Module, heads: Heads, tp: int) -> None:
    """Set a module's head counts to this rank's share, also in a copy of its config if it has the number of heads."""
    if not heads.count:
        return
    numbers = heads.numbers(tp)
    _set(module, numbers)
    config = getattr(module, "config", None)
    if number(config, "heads") == heads.count:
        # A local copy: some modules read the number of heads from the config in each forward.
        local = copy.copy(config)
        _set(local, numbers[:2])
        object.__setattr__(module, "config", local)


def _set(owner: Any, numbers: list[tuple[tuple[str, ...], int, int]]) -> None:
    for names, whole, here in numbers:
        for name in names:
            if getattr(owner, name, None) == whole:
                setattr(owner, name, here)
