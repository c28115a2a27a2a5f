"""Detection of modules whose code calls torch's dropout or noise functions, and replacement of these calls."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from weft.models.keras_model import is_keras_dropout
from weft.parallel.context.attention import dropped_attention
from weft.parallel.context.kernels import AttentionDrop
from weft.parallel.dropout.drop_state import DropSite
from weft.parallel.private_torch import without_override
from weft.parallel.random.streams import lines_of

#: torch functions that drop in training. `F.dropout`, `torch.dropout` and `nn.functional.dropout` share a name.
_DROPS = frozenset({
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_",
    "feature_alpha_dropout", "feature_dropout",
})  # fmt: skip
#: torch functions that drop only if they get a rate, which most callers never pass.
_MAY_DROP = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
#: torch functions and methods that draw noise.
_DRAWS = frozenset({
    "randn_like", "rand_like", "randn", "rand", "randint", "bernoulli", "bernoulli_", "normal_", "uniform_",
    "exponential_", "rsample", "sample", "gumbel_softmax",
})  # fmt: skip
#: Packages whose code is not searched: torch's layers are handled by class, and transformers' layers store their rates
#: in attributes that `drops_itself` reads.
_UNREAD = frozenset({"torch", "transformers", "weft", "numpy", "einops", "keras", *sys.stdlib_module_names})
#: Attributes that hold a rate, in addition to those with "drop" in their names.
_RATE_NAMES = ("p", "rate", "prob")
#: torch's dropout of full channels, and dropout that preserves mean and variance.
CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def calls_dropout(module: nn.Module, known: dict[tuple[type, bool], bool] | None = None) -> bool:
    """Return True if a module may drop values in its own forward, by its class or by calls in its code.

    module: module of a model; its submodules are ignored. known: results for classes whose code was searched, extended
    by this call.
    """
    if isinstance(module, CHANNEL_DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    if is_keras_dropout(module):
        return True
    rates = [value for name, value in vars(module).items() if type(value) in (int, float) and _names_rate(name)]
    if rates and not any(rates):
        return False
    has_rate = bool(rates) or any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.children())
    known, key = {} if known is None else known, (type(module), has_rate)
    if key not in known:
        known[key] = any(_Reader(has_rate).calls(method) for method in _methods(type(module)))
    return known[key]


def _names_rate(name: str) -> bool:
    return ("drop" in name.lower() and name not in _DROPS - {"dropout"}) or name in _RATE_NAMES


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for one in kind.__mro__:
        if not _is_unread(one.__module__):
            for value in vars(one).values():
                function = getattr(value, "__func__", value)  # unwrap static and class methods
                if isinstance(function, types.FunctionType):
                    yield function


def _is_unread(module: str | None) -> bool:
    return module is None or (module.partition(".")[0] in _UNREAD and module != "__main__")


def recomputes_itself(module: nn.Module) -> bool:
    """Return True if a module's code uses a function named `checkpoint`, as of torch.utils.checkpoint.

    It runs parts of forward again in backward. A TorchFunctionMode is inactive in that run, and torch's generators
    restart from their earlier state.
    """
    return any("checkpoint" in method.__code__.co_names for method in _methods(type(module)))


def draws_noise(module: nn.Module, known: dict[tuple[type, bool], bool]) -> bool:
    """Return True if a module's code draws random numbers with torch, except to initialize weights.

    module: module of a model; its submodules are ignored. known: results for classes whose code was searched, extended
    by this call.
    """
    key = type(module), False
    if key not in known:
        methods = [one for one in _methods(type(module)) if "init" not in one.__name__]
        known[key] = any(_Reader(False, _DRAWS).calls(one) for one in methods)
    return known[key]


class _Reader:
    """Searches the bytecode of a function, and of functions that it calls by name, for calls to `wanted`."""

    def __init__(self, has_rate: bool, wanted: frozenset[str] = _DROPS):
        self._has_rate, self._is_expected = has_rate, wanted
        self._seen: set[types.CodeType] = set()

    def calls(self, function: types.FunctionType) -> bool:
        """Return True if the function, or one that it calls, calls a wanted torch function.

        A call that drops only with a rate, such as attention, counts if the code contains a rate.
        """
        names = dict(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                names[name] = cell.cell_contents
        return self._reads(function.__code__, names)

    def _reads(self, code: types.CodeType, names: dict[str, Any]) -> bool:
        if code in self._seen:
            return False
        self._seen.add(code)
        base: Any = None  # value that an attribute is read from, if a global
        before = ""  # local variable that it is read from
        may_drop = has_rate = False
        for step in dis.get_instructions(code):
            name = step.argval if isinstance(step.argval, str) else ""
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                base = _attribute(base, name)
            else:
                base = names.get(name) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") else None
            if step.opname == "LOAD_CONST":
                has_rate |= isinstance(step.argval, float) and 0 < step.argval < 1
            elif step.opname.startswith("LOAD"):
                is_local = step.opname.startswith("LOAD_FAST")
                if name in self._is_expected and before != "self" and not is_local:  # self.dropout is a layer
                    return True
                may_drop |= name in _MAY_DROP and self._is_expected is _DROPS
                has_rate |= _names_rate(name) or name == "training"  # a rate of 0 needs no such condition
            if isinstance(base, types.FunctionType) and not _is_unread(base.__module__) and self.calls(base):
                return True
            before = name if step.opname.startswith("LOAD_FAST") else ""
        if 0.0 not in code.co_consts:
            has_rate |= any(isinstance(one, tuple) and "dropout_p" in one for one in code.co_consts)
        inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
        return (may_drop and (has_rate or self._has_rate)) or any(self._reads(one, names) for one in inner)


def _attribute(value: Any, name: str) -> Any:
    try:
        return getattr(value, name, None)
    except Exception:  # a module that loads at first use, and is not installed
        return None


# Noise of a sample is a function of its global index, like dropout, so it does not depend on the sample's rank.


def noise_of(func: Any, site: DropSite, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the random noise for a call to a torch function, or None to call the function itself.

    An in-place function such as normal_ fills and returns its tensor. None is returned if the function draws no noise,
    gets a generator or `out`, or its rows are not samples. func: function of torch, or method of Tensor.
    """
    draw = _NOISE.get(func)
    if draw is None or kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return None
    return draw(site, *args, **kwargs)


def _uniform(site: DropSite, shape: Sequence[int], device: torch.device | str | None) -> Tensor | None:
    """Return random numbers between 0 and 1 that depend on positions, float64, or None if the rows are not samples."""
    where = torch.empty(0, device=device).device
    key = site.key_of_noise(shape)
    if key is None:
        return None
    places = [site.rows(shape[0], where), *(torch.arange(size, device=where) for size in shape[1:])]
    return (lines_of(key, places).double() + (2.0**31 + 0.5)) * 2.0**-32


def _like(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor | None]:
    def draw(site: DropSite, input: Tensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor | None:
        found = _uniform(site, input.shape, device or input.device)
        return None if found is None else _leaf(change(found).to(dtype or input.dtype), rest)

    return draw


def _sized(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor | None]:
    def draw(site: DropSite, *size: Any, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor | None:
        size = rest.pop("size", size)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        found = _uniform(site, shape, device or torch.get_default_device())
        return None if found is None else _leaf(change(found).to(dtype or torch.get_default_dtype()), rest)

    return draw


def _leaf(noise: Tensor, options: dict[str, Any]) -> Tensor:
    return noise.requires_grad_() if options.get("requires_grad") else noise


def _inplace_form(change: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def draw(site: DropSite, self: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        kwargs.pop("generator", None)
        found = _uniform(site, self.shape, self.device)
        return None if found is None else self.copy_(change(found, *args, **kwargs))

    return draw


def _bernoulli(site: DropSite, input: Tensor, p: float | None = None, **rest: Any) -> Tensor | None:
    del rest
    found = _uniform(site, input.shape, input.device)
    return None if found is None else (found < (input if p is None else p)).to(input.dtype)


def _integers(
    site: DropSite, low: int, high: Any = None, size: Any = None, *, dtype: Any = None, device: Any = None, **rest: Any
) -> Tensor | None:
    del rest
    if not isinstance(high, int):
        low, high, size = 0, low, high if size is None else size
    found = _uniform(site, size, device or torch.get_default_device())
    return None if found is None else (found * (high - low) + low).floor().to(dtype or torch.int64)


def _normal(uniform: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return torch.special.ndtri(uniform) * std + mean


def _between(uniform: Tensor, low: float = 0.0, high: float = 1.0, **named: float) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return uniform * (high - low) + low


def _same(uniform: Tensor) -> Tensor:
    return uniform


_NOISE: dict[Any, Callable[..., Tensor | None]] = {
    torch.randn_like: _like(_normal),
    torch.rand_like: _like(_same),
    torch.randn: _sized(_normal),
    torch.rand: _sized(_same),
    torch.randint: _integers,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.normal_: _inplace_form(_normal),
    Tensor.uniform_: _inplace_form(_between),
    Tensor.exponential_: _inplace_form(lambda uniform, lambd=1.0: uniform.log() / -lambd),
    Tensor.bernoulli_: _inplace_form(lambda uniform, p=0.5: (uniform < p).to(uniform.dtype)),
}


# Dropout functions of torch, by position: a mode replaces their calls while a module's forward runs.

#: The constant of torch's alpha dropout: the negative of SELU's limit at minus infinity.
_ALPHA = 1.7580993408473766
#: Number of dims of an input that has no batch dim.
_UNBATCHED = {F.dropout1d: 2, F.dropout3d: 4}


class ByPosition(TorchFunctionMode):
    """Mode in which dropout functions that a module's own code calls have masks that depend on positions."""

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
        if func is Tensor.unflatten:  # equivalent; torch.compile cannot trace the method
            return torch.unflatten(*args, **kwargs)
        if not torch.compiler.is_compiling():
            if func in _OTHERS and self._is_callers():
                return _OTHERS[func](self, func, *args, **kwargs)
            if func in _NOISE and self._is_callers():
                found = noise_of(func, self.site, args, kwargs)
                return func(*args, **kwargs) if found is None else found
        return func(*args, **kwargs)

    def _is_callers(self) -> bool:
        """Return True if the call stack is empty, its innermost module is the site's, or the code is compiled.

        Calls of inner modules do not count, because they may be recomputed without the mode.
        """
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
        del enable_gqa  # derived from the shapes
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
        """Compute attention for inputs without a head dim, or with several dims between samples and heads."""
        lead = query.shape[:-2]

        def in_four(x: Tensor) -> Tensor:
            return x.reshape(-1, *(x.shape[-3:] if len(lead) > 1 else (1, *x.shape[-2:])))

        if mask is not None and mask.ndim > 2:
            mask = in_four(mask.expand(*lead, *mask.shape[-2:]))
        out = self._attend(in_four(query), in_four(key), in_four(value), mask, rate, is_causal, scale)
        return out.reshape(*lead, *out.shape[-2:])


def _with_parts_by_position(function: Callable[..., Any]) -> Callable[..., Any]:
    body = without_override(function)  # so that the mode intercepts the calls inside

    def run(mode: ByPosition, func: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return body(*args, **kwargs)

    return run


def _drop_channels(
    mode: ByPosition, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0:
        return input
    x = input[None] if input.ndim == _UNBATCHED.get(func) else input
    dropped = (x * _channel_mask(mode, x, p) * (1 / (1 - p) if p < 1 else 0.0)).view_as(input)
    return input.copy_(dropped) if inplace else dropped


def _channel_mask(mode: ByPosition, x: Tensor, rate: float) -> Tensor:
    """Return a mask of the channels to keep, (samples, channels, 1, ...)."""
    kept = mode.site.keep(x.shape[:2], rate, x.device)
    return kept.view(*x.shape[:2], *(1,) * (x.ndim - 2))


def _drop_alpha(
    mode: ByPosition, func: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    """Apply F.alpha_dropout or F.feature_alpha_dropout. Dropped values become SELU's limit at minus infinity."""
    if not training or p == 0:
        return input
    by_channel = func is F.feature_alpha_dropout
    kept = _channel_mask(mode, input, p) if by_channel else mode.site.keep(input.shape, p, input.device)
    factor = 0.0 if p >= 1 else ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
    dropped = torch.where(kept, input, -_ALPHA) * factor + _ALPHA * factor * p
    return input.copy_(dropped) if inplace else dropped


def _run_layers(mode: ByPosition, func: Any, *args: Any) -> tuple[Tensor, ...]:
    """Run a recurrent network, layer by layer, with dropout between its layers.

    args: (input, hx, weights, has_biases, num_layers, dropout, training, bidirectional, batch_first), or (values,
    batch_sizes, hx, weights, ..., bidirectional) of packed sequences.
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
    **{one: _with_parts_by_position(one) for one in (F.multi_head_attention_forward, F.gumbel_softmax)},
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), _drop_channels),
    **dict.fromkeys((F.alpha_dropout, F.feature_alpha_dropout), _drop_alpha),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _run_layers),
}


def attend_dropping(site: DropSite, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
    """Compute the attention of `ByPosition._attend` from the flattened arguments of a custom operator.

    inputs: query, key, value, dropout key, sample indices, and optionally the mask. numbers: is_causal, scale, dropout
    rate, first head.
    """
    del site
    query, key, value, drop_key, samples = inputs[:5]
    is_causal, scale, rate, first_head = numbers
    drop = AttentionDrop(rate, drop_key, samples, int(first_head))
    mask = inputs[5] if len(inputs) > 5 else None
    return dropped_attention(query, key, value, mask, bool(is_causal), scale, drop)


def _read(args: Any, kwargs: dict[str, Any], index: int, name: str, default: Any) -> Any:
    return args[index] if len(args) > index else kwargs.get(name, default)
