"""Sizes of sharded dims as integers that record how code uses them.

A rank has only its part of a sharded dim, so a number computed from its size differs from the result on one process. A
reshape may use such a size if the same reshape of the part gives the part of the reshaped tensor.
"""

from __future__ import annotations

import math
import operator
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any, SupportsInt, TypeGuard

import torch

from weft.private_torch import tree_leaves

#: Methods that reshape by sizes, and the position of the first size among their arguments.
RESHAPES = {"view": 1, "reshape": 1, "unflatten": 2, "expand": 1, "broadcast_to": 1}
#: Functions that make tensors of one value.
CONSTANTS = ("zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full")
Misuse = Callable[[str], None]


def _arithmetic(name: str, compute: Callable[[int, int], int]) -> Any:
    def method(self: Counted, other: Any) -> Any:
        if not isinstance(other, int):
            if not isinstance(other, torch.Tensor):
                self.misuse("computes with {}")
            return NotImplemented
        full, part = int.__add__(self, 0), other.part if isinstance(other, Counted) else other
        if "div" in name or "mod" in name:
            divisor = self.part if name.startswith("__r") else part
            if not divisor:
                self.misuse("divides by {}")
                return compute(full, int.__add__(other, 0))
        return Counted.of(compute(full, int.__add__(other, 0)), compute(self.part, part), self.misuse)

    return method


def _comparison(name: str, compute: Callable[[int, int], bool]) -> Any:
    def method(self: Counted, other: Any) -> Any:
        if not isinstance(other, int):
            return getattr(int, name)(self, other)
        result = compute(int.__add__(self, 0), int.__add__(other, 0))
        if not isinstance(other, Counted) or compute(self.part, other.part) != result:
            self.misuse("compares {} with a number")
        return result

    return method


def _number(name: str) -> Any:
    def method(self: Counted, *others: Any) -> Any:
        self.misuse("computes with {}")
        plain = (int.__add__(one, 0) if isinstance(one, Counted) else one for one in others)
        return getattr(int, name)(int.__add__(self, 0), *plain)

    return method


class Counted(int):
    """The size of a sharded dim, or a number computed from it. part: its value on one of the ranks."""

    part: int
    misuse: Misuse

    @staticmethod
    def of(full: int, part: int, misuse: Misuse) -> Counted:
        """Return a `Counted` with these values.

        Args:
            full: value on one process.
            part: value on one of the ranks.
            misuse: called with a description of each use other than in integer arithmetic and reshapes. `{}` means
                the size in it.
        """
        found = Counted(full)
        found.part, found.misuse = part, misuse
        return found

    def __hash__(self) -> int:  # so that code that caches by size, such as einops, skips its cache
        raise TypeError("unhashable: the size of a divided dim")

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int.__add__(self, 0),)

    def __float__(self) -> float:
        self.misuse("computes with {}")
        return int.__float__(self)

    def __int__(self) -> int:
        self.misuse("converts {} to a number")
        return int.__add__(self, 0)

    def __neg__(self) -> Counted:
        return Counted.of(-int.__add__(self, 0), -self.part, self.misuse)

    __mul__ = _arithmetic("__mul__", operator.mul)
    __add__ = _arithmetic("__add__", operator.add)
    __sub__ = _arithmetic("__sub__", operator.sub)
    __floordiv__ = _arithmetic("__floordiv__", lambda one, other: one // other)
    __mod__ = _arithmetic("__mod__", lambda one, other: one % other)
    __radd__, __rmul__ = _arithmetic("__radd__", operator.add), _arithmetic("__rmul__", operator.mul)
    __rsub__ = _arithmetic("__rsub__", lambda one, other: other - one)
    __rfloordiv__ = _arithmetic("__rfloordiv__", lambda one, other: other // one)
    __rmod__ = _arithmetic("__rmod__", lambda one, other: other % one)
    __eq__, __ne__ = _comparison("__eq__", operator.eq), _comparison("__ne__", operator.ne)
    __lt__, __le__ = _comparison("__lt__", operator.lt), _comparison("__le__", operator.le)
    __gt__, __ge__ = _comparison("__gt__", operator.gt), _comparison("__ge__", operator.ge)
    __truediv__, __rtruediv__ = _number("__truediv__"), _number("__rtruediv__")
    __pow__, __rpow__ = _number("__pow__"), _number("__rpow__")
    __divmod__, __rdivmod__ = _number("__divmod__"), _number("__rdivmod__")
    __lshift__, __rshift__ = _number("__lshift__"), _number("__rshift__")
    __and__, __or__, __xor__ = _number("__and__"), _number("__or__"), _number("__xor__")


class _RangeType(type):
    """Class of `_range`, which equals `range` for code that uses it as a class."""

    def __call__(cls, *bounds: int) -> range:
        for one in bounds:
            if isinstance(one, Counted):
                one.misuse("loops over {}")
        return range(*bounds)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, range)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, range)

    def __eq__(cls, other: object) -> bool:
        return other is range or other is cls

    def __hash__(cls) -> int:
        return hash(range)


_range = _RangeType("range", (), {})


@contextmanager
def watched_loops(model: torch.nn.Module) -> Generator[None]:
    """Record each `range` over a `Counted` number in the model's own code inside the context, by its `misuse`.

    The name `range` is replaced in the loaded modules of `_code_of`, because the built-in accepts a `Counted`.
    """
    changed = [space for space in _code_of(model) if space.setdefault("range", _range) is _range]
    try:
        yield
    finally:
        for space in changed:
            space.pop("range", None)


def _code_of(model: torch.nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the globals of the model's forwards, of the packages of its classes, and of code that is not installed."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    names = {kind.__module__.partition(".")[0] for kind in kinds} - sys.stdlib_module_names - {"torch", "weft"}
    for kind in kinds:
        forward = vars(kind).get("forward")
        if isinstance(forward, FunctionType) and not kind.__module__.startswith(("torch.", "weft.")):
            yield forward.__globals__
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    loaded: list[tuple[str, object]] = [*sys.modules.items()]
    for name, code in loaded:
        top = name.partition(".")[0]
        if top in ("torch", "weft") or not isinstance(code, ModuleType):  # sys.modules may have other objects
            continue
        file = vars(code).get("__file__")
        if top in names or (isinstance(file, str) and not file.startswith(installed)):
            yield vars(code)


def counted_result(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any, dim: int, part: int, misuse: Misuse
) -> Any:
    """Return the result of a size query, with the size of the sharded dim as a `Counted`.

    Args:
        name: name of the method or attribute.
        args: positional arguments; the tensor is first.
        kwargs: keyword arguments.
        result: result of the query in torch.
        dim: the sharded dim.
        part: size of the dim on one rank.
        misuse: see `Counted.of`.
    """
    tensor: torch.Tensor = args[0]
    size = int(tensor.shape[dim])
    if isinstance(result, torch.Size):
        sizes: list[int] = [*result]
        sizes[dim] = Counted.of(size, part, misuse)
        return torch.Size(sizes)
    if name in ("numel", "nelement"):
        return Counted.of(result, result // size * part, misuse)
    asked = args[1] if len(args) > 1 else kwargs.get("dim", dim)
    return Counted.of(size, part, misuse) if isinstance(result, int) and asked % tensor.dim() == dim else result


def sizes_of(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[SupportsInt] | None:
    """Return the sizes that a reshape was called with, or None for a call without sizes.

    Args:
        name: name of the function.
        args, kwargs: its arguments.
    """
    rest = [*args[RESHAPES[name] :], *(kwargs[key] for key in ("size", "shape", "sizes") if key in kwargs)]
    found: list[Any] = []
    for one in rest:
        found += one if isinstance(one, list | tuple) else [one]
    return found if found and all(isinstance(each, int) for each in found) else None


def fits_parts(name: str, args: Sequence[Any], kwargs: dict[str, Any], shape: Sequence[int], made: list[int]) -> bool:
    """Return True if reshaping a rank's part gives the corresponding part of the reshaped tensor.

    Args:
        name: name of the method.
        args: positional arguments of the call on the full tensor.
        kwargs: keyword arguments of that call.
        shape: shape of the part.
        made: expected shape of the reshaped part.
    """
    sizes = sizes_of(name, args, kwargs)
    if sizes is None:
        return True
    parts = [each.part if isinstance(each, Counted) else int(each) for each in sizes]
    if name in ("expand", "broadcast_to"):
        missing = len(parts) - len(shape)
        parts = [shape[at - missing] if size == -1 else size for at, size in enumerate(parts)]
        return parts == made
    total, before, after = math.prod(shape), [], []
    if name == "unflatten":
        dim = int(args[1] if len(args) > 1 else kwargs["dim"]) % len(shape)
        total, before, after = shape[dim], [*shape[:dim]], [*shape[dim + 1 :]]
    if -1 in parts:
        known = -math.prod(parts)
        if known <= 0 or total % known:
            return False
        parts[parts.index(-1)] = total // known
    return [*before, *parts, *after] == made


def counted_in(values: Any) -> Iterator[Counted]:
    """Yield the `Counted` sizes in the arguments of a call, including those in slices."""
    for leaf in tree_leaves(values):
        if isinstance(leaf, Counted):
            yield leaf
        elif _is_slice(leaf):
            yield from (one for one in (leaf.start, leaf.stop, leaf.step) if isinstance(one, Counted))


def _is_slice(value: Any) -> TypeGuard[slice[Any, Any, Any]]:
    return isinstance(value, slice)


def parts_of_index(index: Any, rank: int) -> list[Any] | None:
    """Return the elements of an index, with full slices for `...` and for missing dims.

    Return None if an element is a tensor or a list. rank: number of dims of the indexed tensor.
    """
    parts: list[Any] = [*index] if isinstance(index, tuple) else [index]
    if any(isinstance(part, torch.Tensor | list) for part in parts):
        return None
    place = next((at for at, part in enumerate(parts) if part is Ellipsis), len(parts))
    missing = rank - sum(part is not None and part is not Ellipsis for part in parts)
    return [*parts[:place], *(slice(None),) * missing, *parts[place + 1 :]]


def track_reshape(old: tuple[int, ...], new: tuple[int, ...], dim: int) -> int | None:
    """Return the dim that holds the shards of `dim` in order after a reshape, or None if no single dim does.

    A single dim holds them if only dims of size 1 precede `dim` among the dims that it is merged with.
    """
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        size_i, size_j = _take(old, i), _take(new, j)
        i, j = i + 1, j + 1
        while size_i != size_j:
            if size_i < size_j:
                size_i, i = size_i * _take(old, i), i + 1
            else:
                size_j, j = size_j * _take(new, j), j + 1
            if i > len(old) or j > len(new):
                return None
        if first_i <= dim < i:
            if any(size != 1 for size in old[first_i:dim]):
                return None
            while len(old) == 1 and first_j < j - 1 and new[first_j] == 1:
                first_j += 1  # one number per head in the shape of scores; otherwise the 1 is the number of heads
            return first_j if first_j < len(new) else None
    return None


def _take(sizes: tuple[int, ...], place: int) -> int:
    return sizes[place] if place < len(sizes) else 1
