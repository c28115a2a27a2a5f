"""Layers that carry a state, over sequences that context parallelism shards: each rank computes only its tokens.

Projections, norms and gates work token by token. Two functions that transformers' layers call read other tokens:

- The convolution reads the last tokens of the previous rank.
- The recurrence reads all earlier tokens, but each of its heads is independent. Ranks exchange tokens for heads before
  it and back after it, as attention does in Ulysses. So each rank computes all tokens of 1/cp of the heads.

All ranks call the same collectives in the same order, so no rank waits for the result of another.

B rows, T tokens of this rank, S tokens of the full sequence, H heads, h heads of this rank, C features of a head,
D channels, W previous tokens that a convolution reads.
"""

from __future__ import annotations

import dis
import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.autograd import exchange_dims
from weft.comm.mesh import Axis
from weft.comm.peer import shift
from weft.models.inspect.blocks import replace_class
from weft.parallel.layers.state_mixers import CONVOLUTIONS, MIXERS, OF_KERNELS, Documents, mixer_name
from weft.private_torch import Function

#: Argument by which a hook passes `ShardedRows` to the layer's forward.
SHARDED_ROWS = "_weft_sharded_rows"
#: Attributes of layers that contain the number of heads. Each channel of Mamba 1 is a head.
_HEADS = ("num_v_heads", "num_heads", "intermediate_size")


class ShardedRows:
    """The rows of one call of a layer: `axis` shards their tokens.

    documents: documents of the full sequences, or None if each row is one document.
    """

    def __init__(self, axis: Axis, documents: Documents | None):
        self.axis, self.documents = axis, documents

    def call(self, forward: types.FunctionType, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Call the layer's original forward, with this rank's tokens, on functions that read the other ranks' tokens.

        The result is the output for this rank's tokens.
        """
        known = forward.__globals__
        ours = {name: functools.partial(one, self, known[name]) for name, one in _FUNCTIONS.items() if name in known}
        own = types.FunctionType(forward.__code__, known | ours, forward.__name__, None, forward.__closure__)
        own.__defaults__, own.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
        return own(layer, *args, **{name: value for name, value in kwargs.items() if name not in OF_KERNELS})

    def by_heads(self, *parts: Tensor) -> list[Tensor]:
        """Exchange tokens for heads: (B, T, H) or (B, T, H, C) become (B, S, h) or (B, S, h, C).

        Heads are repeated if their number is not a multiple of cp, as it may be for keys that several heads share.
        """
        cp, done = self.axis.size, dict[int, Tensor]()
        heads = [math.lcm(part.shape[2], cp) // cp for part in parts]
        parts = tuple(one.repeat_interleave(h * cp // one.shape[2], 2) for one, h in zip(parts, heads, strict=True))
        for dtype in dict.fromkeys(part.dtype for part in parts):
            places = [place for place, part in enumerate(parts) if part.dtype == dtype]
            rows = [parts[place].unflatten(2, (cp, -1)).flatten(3) for place in places]
            joined = exchange_dims(torch.cat(rows, 3), self.axis, 2, 1)
            pieces = joined.split([row.shape[3] for row in rows], 3)
            for place, piece in zip(places, pieces, strict=True):
                done[place] = piece.reshape(*piece.shape[:2], heads[place], *parts[place].shape[3:])
        return [done[place] for place in range(len(parts))]

    def by_tokens(self, x_BShC: Tensor) -> Tensor:
        """Exchange heads for tokens: the result is (B, T, H, C) or (B, T, H)."""
        return exchange_dims(x_BShC, self.axis, 1, 2)

    def own_heads(self, x_H: Tensor | None) -> Tensor | None:
        """Return this rank's heads of a parameter."""
        size = self.axis.size
        return None if x_H is None else x_H.narrow(0, self.axis.rank * (x_H.shape[0] // size), x_H.shape[0] // size)

    def run(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Return the function of full rows, (B, S, ...), with each document as a separate row."""
        return function(*rows) if self.documents is None else self.documents.run_apart(function, *rows)


def keep_tokens(layer: nn.Module) -> None:
    """Make the forward of a layer use `ShardedRows` if it gets them as an argument. Modifies the layer."""
    replace_class(layer, _ShardedLayer, _members)


def num_previous_tokens(layer: nn.Module) -> int:
    """Return the number of previous tokens that the convolution of a layer reads."""
    return next(one.kernel_size[0] for one in layer.modules() if isinstance(one, nn.Conv1d)) - 1


def can_keep_tokens(layer: nn.Module, cp: int) -> bool:
    """Return True if each of cp ranks can compute its tokens of this layer.

    The layer must be in `MIXERS` and call functions that `ShardedRows` replaces, and cp must divide its heads.
    """
    if (name := mixer_name(layer)) not in MIXERS:
        return False
    called = _called(inspect.unwrap(type(layer).forward).__code__)
    if "causal_conv1d_fn" not in called:
        return False  # another release of transformers
    if name in CONVOLUTIONS:
        return True
    heads = next((getattr(layer, name) for name in _HEADS if hasattr(layer, name)), 1)
    return bool(called & _RECURRENCES) and heads % cp == 0


@functools.cache
def _called(code: types.CodeType) -> frozenset[str]:
    """Return the names of the functions to replace that code calls."""
    return frozenset(_FUNCTIONS) & {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}


class _ShardedLayer(nn.Module):
    """Base class of layers whose forward can use `ShardedRows`."""


def _members(kind: type) -> dict[str, Any]:
    plain: Callable[..., Tensor] = kind.forward  # pyright: ignore[reportAttributeAccessIssue] - a module class
    original: Any = inspect.unwrap(plain)

    @functools.wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        rows: ShardedRows | None = kwargs.pop(SHARDED_ROWS, None)
        return plain(self, *args, **kwargs) if rows is None else rows.call(original, self, *args, **kwargs)

    return {"forward": forward}


# Functions with the interfaces of those that transformers' layers call. `own` is the function that one replaces.


def _convolve(
    rows: ShardedRows, own: Callable[..., Tensor], x_BDT: Tensor, weight: Tensor, bias: Tensor | None = None,
    **given: Any,
) -> Tensor:  # fmt: skip
    """Return the causal convolution of this rank's tokens, (B, D, T)."""
    width, num_tokens = weight.shape[-1] - 1, x_BDT.shape[-1]
    x_BDT = torch.cat([_Shift.apply(x_BDT[..., num_tokens - width :], rows.axis), x_BDT], -1)
    if rows.documents is None:
        return own(x_BDT, weight, bias, **given)[..., width:]
    begin = rows.axis.rank * num_tokens
    documents = rows.documents.between(begin - width, begin + num_tokens)

    def run(x_GLD: Tensor) -> Tensor:
        return own(x_GLD.transpose(1, 2), weight, bias, **given).transpose(1, 2)

    return documents.run_apart(run, x_BDT.transpose(1, 2)).transpose(1, 2)[..., width:]


def _delta_rule(
    rows: ShardedRows, own: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor,
    **given: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the output of a gated delta rule for this rank's tokens, (B, T, H, C), and no final state."""

    def run(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return own(query, key, value, g=g, beta=beta, **given)[0]

    return rows.by_tokens(rows.run(run, *rows.by_heads(query, key, value, g, beta))), None


def _scan(
    rows: ShardedRows, own: Callable[..., Tensor], x_BTHC: Tensor, dt_BTH: Tensor, a_H: Tensor, b_BTGN: Tensor,
    c_BTGN: Tensor, *, D: Tensor | None = None, dt_bias: Tensor | None = None, **given: Any,
) -> Tensor:  # fmt: skip
    """Return the scan of Mamba 2 for this rank's tokens, (B, T, H, C). Heads share B and C in G groups."""
    given |= {"D": rows.own_heads(D), "dt_bias": rows.own_heads(dt_bias)}
    a_h = rows.own_heads(a_H)

    def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return own(x, dt, a_h, b, c, **given)

    return rows.by_tokens(rows.run(run, *rows.by_heads(x_BTHC, dt_BTH, b_BTGN, c_BTGN)))


def _channel_scan(
    rows: ShardedRows, own: Callable[..., Tensor], x_BDT: Tensor, dt_BDT: Tensor, a_DN: Tensor, b_BNT: Tensor,
    c_BNT: Tensor, *, D: Tensor | None = None, z: Tensor | None = None, delta_bias: Tensor | None = None, **given: Any,
) -> Tensor:  # fmt: skip
    """Return the scan of Mamba 1 for this rank's tokens, (B, D, T). All channels share B and C."""
    given |= {"D": rows.own_heads(D), "delta_bias": rows.own_heads(delta_bias)}
    a_h = rows.own_heads(a_DN)

    def run(b: Tensor, c: Tensor, *channels: Tensor) -> Tensor:
        x, dt, *gate = (one.transpose(1, 2) for one in channels)
        b, c = (one.squeeze(2).transpose(1, 2) for one in (b, c))
        return own(x, dt, a_h, b, c, z=gate[0] if gate else None, **given).transpose(1, 2)

    shared = (one.transpose(1, 2).unsqueeze(2) for one in (b_BNT, c_BNT))
    channels = (one.transpose(1, 2) for one in (x_BDT, dt_BDT, z) if one is not None)
    return rows.by_tokens(rows.run(run, *rows.by_heads(*shared, *channels))).transpose(1, 2)


def _none(rows: ShardedRows, own: Callable[..., Any], *args: Any, **given: Any) -> None:
    """Return None, as fused functions do without kernels: the layer then calls the functions above."""


#: By the name of a function of transformers: its replacement, which gets `ShardedRows` and that function first.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba_selective_scan": _channel_scan,
    "mamba2_split_conv1d_scan_combined": _none,
    "mamba_inner_fn": _none,
}
_RECURRENCES = {name for name, one in _FUNCTIONS.items() if one not in (_convolve, _none)}


class _Shift(Function):
    """Autograd function that returns the previous rank's tensor, and zeros on the first rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        received = shift(x.contiguous(), axis)
        return received if axis.rank else torch.zeros_like(received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        axis = ctx.axis
        received = shift(grads[0].contiguous(), axis, -1)
        return received if axis.rank < axis.size - 1 else torch.zeros_like(received), None
