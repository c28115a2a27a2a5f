"""torch's functions that drop values, by position: a mode replaces their calls while a module's forward runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.parallel.context import AttentionDrop, dropped_attention
from weft.parallel.dropout.drops import DropSite
from weft.parallel.dropout.sample_noise import draws, noise_of
from weft.parallel.private_torch import without_override

#: Attention of nn.MultiheadAttention, whose steps an active mode sees one by one.
_ATTEND_HEADS = without_override(F.multi_head_attention_forward)
_CHOOSE = without_override(F.gumbel_softmax)
#: The constant of torch's alpha dropout: the negative of SELU's limit at minus infinity.
_ALPHA = 1.7580993408473766
#: Dims of an input without samples.
_UNBATCHED = {F.dropout1d: 2, F.dropout3d: 4}


class ByPosition(TorchFunctionMode):
    """While active, functions of torch that drop do so by position, if a module calls them in its own code.

    Args:
        site: of the module.
    """

    def __init__(self, site: DropSite):
        super().__init__()
        self.site = site

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            rate, training = _read(args, kwargs, 1, "p", 0.5), _read(args, kwargs, 2, "training", True)
            if training and rate > 0 and self._is_callers():
                x = args[0] if args else kwargs["input"]
                dropped = self.site.drop(x, rate)
                return x.copy_(dropped) if _read(args, kwargs, 3, "inplace", False) else dropped
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention and _read(args, kwargs, 4, "dropout_p", 0.0) > 0:
            return self._attend(*args, **kwargs) if self._is_callers() else func(*args, **kwargs)
        if func is Tensor.unflatten:  # which torch.compile does not follow from here; the two are the same
            return torch.unflatten(*args, **kwargs)
        if not torch.compiler.is_compiling():
            if func in _OTHERS and self._is_callers():
                return _OTHERS[func](self, func, *args, **kwargs)
            if draws(func) and self._is_callers():
                found = noise_of(func, self.site, args, kwargs)
                return func(*args, **kwargs) if found is None else found
        return func(*args, **kwargs)

    def _is_callers(self) -> bool:
        """Whether the site's module calls. A replay of a module inside of it may run without this mode."""
        if torch.compiler.is_compiling():
            return True
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module):
                return getattr(owner, "_weft_site", None) is self.site
            frame = frame.f_back
        return True

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        del enable_gqa  # heads are read off the shapes
        if query.ndim != 4:
            return self._attend_in_four_dims(query, key, value, attn_mask, dropout_p, is_causal, scale)
        drop = self.site.attention(dropout_p, query.shape[0], query.shape[1], query.device)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        if not torch.compiler.is_compiling():
            return dropped_attention(query, key, value, attn_mask, is_causal, factor, drop)
        assert isinstance(drop.key, Tensor)
        inputs = [query, key, value, drop.key, drop.samples, *([] if attn_mask is None else [attn_mask])]
        shape = (*query.shape[:3], value.shape[3])
        return self.site.handle(
            shape, query.dtype, inputs, [float(is_causal), factor, dropout_p, float(drop.first_head)]
        )

    def _attend_in_four_dims(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rate: float, is_causal: bool,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        """Attention of inputs without heads, or with further dims between samples and heads."""
        lead = query.shape[:-2]

        def in_four(x: Tensor) -> Tensor:
            return x.reshape(-1, *(x.shape[-3:] if len(lead) > 1 else (1, *x.shape[-2:])))

        if mask is not None and mask.ndim > 2:
            mask = in_four(mask.expand(*lead, *mask.shape[-2:]))
        out = self._attend(in_four(query), in_four(key), in_four(value), mask, rate, is_causal, scale)
        return out.reshape(*lead, *out.shape[-2:])


def _attend_heads(mode: ByPosition, func: Any, *args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward`, whose parts drop by position."""
    del func
    with mode:
        return _ATTEND_HEADS(*args, **kwargs)


def _choose(mode: ByPosition, func: Any, *args: Any, **kwargs: Any) -> Any:
    """`F.gumbel_softmax`, whose noise follows samples."""
    del func
    with mode:
        return _CHOOSE(*args, **kwargs)


def _drop_channels(
    mode: ByPosition, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """`F.dropout1d`, `F.dropout2d` and `F.dropout3d`."""
    if not training or p == 0:
        return input
    x = input[None] if input.ndim == _UNBATCHED.get(func) else input
    dropped = (x * _kept_channels(mode, x, p) * (1 / (1 - p) if p < 1 else 0.0)).view_as(input)
    return input.copy_(dropped) if inplace else dropped


def _kept_channels(mode: ByPosition, x: Tensor, rate: float) -> Tensor:
    """Which channels stay, of (samples, channels, ...), with dims of 1 behind."""
    kept = mode.site.keep(x.shape[:2], rate, x.device)
    return kept.view(*x.shape[:2], *(1,) * (x.ndim - 2))


def _drop_alpha(
    mode: ByPosition, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """`F.alpha_dropout` and `F.feature_alpha_dropout`: dropped values become SELU's limit, and the moments stay."""
    if not training or p == 0:
        return input
    by_channel = func is F.feature_alpha_dropout
    kept = _kept_channels(mode, input, p) if by_channel else mode.site.keep(input.shape, p, input.device)
    factor = 0.0 if p >= 1 else ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    dropped = torch.where(kept, input, -_ALPHA) * factor + _ALPHA * factor * p
    return input.copy_(dropped) if inplace else dropped


def _run_layers(mode: ByPosition, func: Any, *args: Any) -> tuple[Tensor, ...]:
    """A recurrent network, layer by layer, with dropout between its layers.

    args: (input, hx, weights, has_biases, num_layers, dropout, training, bidirectional, batch_first), or
    (values, batch_sizes, hx, weights, ..., bidirectional) of packed sequences.
    """
    is_packed = isinstance(args[3], list | tuple)
    lead, rest = args[: 1 + is_packed], args[1 + is_packed :]
    hx, weights, biases, num_layers, rate, training, both_ways, *batch_first = rest
    if not training or rate == 0 or num_layers == 1:
        return func(*args)
    states = hx if isinstance(hx, list | tuple) else [hx]
    ways, per_layer = 1 + both_ways, len(weights) // num_layers
    x, ends = lead[0], list[Any]()
    for layer in range(num_layers):
        if layer and is_packed:
            x = mode.site.drop_packed(x, lead[1], rate)
        elif layer:
            x = mode.site.drop(x, rate) if batch_first[0] else mode.site.drop(x.transpose(0, 1), rate).transpose(0, 1)
        own = [one[layer * ways : (layer + 1) * ways] for one in states]
        part = weights[layer * per_layer : (layer + 1) * per_layer]
        begin = own if isinstance(hx, list | tuple) else own[0]
        x, *end = func(x, *lead[1:], begin, part, biases, 1, 0.0, training, both_ways, *batch_first)
        ends.append(end)
    return x, *map(torch.cat, zip(*ends, strict=True))


_OTHERS: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _attend_heads,
    F.gumbel_softmax: _choose,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), _drop_channels),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), _drop_alpha),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _run_layers),
}


def attend_dropping(site: DropSite, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    """Compute what `ByPosition._attend` does, from the inputs of an operator."""
    del site
    query, key, value, drop_key, samples = inputs[:5]
    is_causal, scale, rate, first_head = numbers
    drop = AttentionDrop(rate, drop_key, samples, int(first_head))
    mask = inputs[5] if len(inputs) > 5 else None
    return dropped_attention(query, key, value, mask, bool(is_causal), scale, drop)


def _read(args: Any, kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)
