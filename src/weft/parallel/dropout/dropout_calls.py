"""Find modules whose code calls torch's dropout functions, whatever they call their rate."""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

#: Functions of torch that drop in training. `F.dropout`, `torch.dropout` and `nn.functional.dropout` share a name.
_DROPS = frozenset({
    "dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "alpha_dropout_",
    "feature_alpha_dropout", "feature_dropout",
})  # fmt: skip
#: Functions of torch that drop if they are given a rate, which most of their callers never do.
_MAY_DROP = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})
#: Functions and methods of torch that draw noise.
_DRAWS = frozenset({
    "randn_like", "rand_like", "randn", "rand", "randint", "bernoulli", "bernoulli_", "normal_", "uniform_",
    "exponential_", "rsample", "sample", "gumbel_softmax",
})  # fmt: skip
#: Packages whose code is not read: torch's layers are handled by class, and transformers' keep their rates as
#: attributes that `drops_itself` reads.
_UNREAD = frozenset({"torch", "transformers", "weft", "numpy", "einops", *sys.stdlib_module_names})
#: Attributes that hold a rate, apart from those with "drop" in their names.
_RATE_NAMES = ("p", "rate", "prob")
#: torch's dropout of channels, and of values that keep their mean and variance.
CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def calls_dropout(module: nn.Module, known: dict[tuple[type, bool], bool] | None = None) -> bool:
    """Return whether a module may drop values in its own forward: by its class, or by calls in its code.

    Args:
        module: of a model; its submodules are not looked at.
        known: classes whose code was read, which this adds to.
    """
    if isinstance(module, CHANNEL_DROPOUTS):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
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
                function = getattr(value, "__func__", value)  # of static and class methods
                if isinstance(function, types.FunctionType):
                    yield function


def _is_unread(module: str | None) -> bool:
    return module is None or (module.partition(".")[0] in _UNREAD and module != "__main__")


def recomputes_itself(module: nn.Module) -> bool:
    """Return whether a module's code calls torch.utils.checkpoint, which runs parts of its forward a second time.

    No mode is active then. torch's generators start again from where they were.
    """
    return any("checkpoint" in method.__code__.co_names for method in _methods(type(module)))


def draws_noise(module: nn.Module, known: dict[tuple[type, bool], bool]) -> bool:
    """Return whether a module's code, apart from what makes its weights, draws random numbers of torch.

    Args:
        module: of a model; its submodules are not looked at.
        known: classes whose code was read, which this adds to.
    """
    key = type(module), False
    if key not in known:
        methods = [one for one in _methods(type(module)) if "init" not in one.__name__]
        known[key] = any(_Reader(False, _DRAWS).calls(one) for one in methods)
    return known[key]


class _Reader:
    """Reads the bytecode of a function and of those that it calls by name.

    Args:
        has_rate: their module holds a rate.
        wanted: the functions that are looked for.
    """

    def __init__(self, has_rate: bool, wanted: frozenset[str] = _DROPS):
        self._has_rate, self._wanted = has_rate, wanted
        self._seen: set[types.CodeType] = set()

    def calls(self, function: types.FunctionType) -> bool:
        """Return whether the function drops, or calls one that does."""
        names = dict(function.__globals__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                names[name] = cell.cell_contents
        return self._reads(function.__code__, names)

    def _reads(self, code: types.CodeType, names: dict[str, Any]) -> bool:
        if code in self._seen:
            return False
        self._seen.add(code)
        base: Any = None  # the value that an attribute is read from, where a global name gives it
        before = ""  # the local variable that it is read from
        may_drop = has_rate = False
        for step in dis.get_instructions(code):
            name = step.argval if isinstance(step.argval, str) else ""
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                base = getattr(base, name, None)
            else:
                base = names.get(name) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF") else None
            if step.opname == "LOAD_CONST":
                has_rate |= isinstance(step.argval, float) and 0 < step.argval < 1
            elif step.opname.startswith("LOAD"):
                is_local = step.opname.startswith("LOAD_FAST")
                if name in self._wanted and before != "self" and not is_local:  # self.dropout is a layer
                    return True
                may_drop |= name in _MAY_DROP and self._wanted is _DROPS
                has_rate |= _names_rate(name) or name == "training"  # a rate of 0 needs no such condition
            if isinstance(base, types.FunctionType) and not _is_unread(base.__module__) and self.calls(base):
                return True
            before = name if step.opname.startswith("LOAD_FAST") else ""
        if 0.0 not in code.co_consts:
            has_rate |= any(isinstance(one, tuple) and "dropout_p" in one for one in code.co_consts)
        inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
        return (may_drop and (has_rate or self._has_rate)) or any(self._reads(one, names) for one in inner)
