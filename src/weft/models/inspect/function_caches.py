"""Caches of a model's source files: functools.lru_cache and dicts in which its functions keep results."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Generator, Iterator
from typing import Any, cast

import torch
from torch import nn

from weft.private_torch import tree_leaves

#: Packages whose caches hold no tensors of a model's forward.
_LIBRARIES = frozenset({"torch", "weft", "builtins", "typing", "keras"})
_MOST_KEYS = 10_000
_CACHED: Any = type(functools.cache(len))


@contextlib.contextmanager
def cleared_caches(model: nn.Module) -> Generator[None]:
    """Remove results that a model's functions cached within the context, such as masks on the meta device.

    They would be used again in training, where torch computes wrong products of them. The functions are found in the
    source files of the model's classes, and in these classes.
    """
    functions: list[tuple[Any, int]] = []
    dicts: list[tuple[dict[Any, Any], set[Any]]] = []
    for value in _values(model):
        if isinstance(value, _CACHED):
            functions.append((value, value.cache_info().misses))
        elif type(value) is dict and len(value := cast("dict[Any, Any]", value)) < _MOST_KEYS:
            dicts.append((value, set(value)))
    try:
        yield
    finally:
        for function, misses in functions:
            if function.cache_info().misses != misses:
                function.cache_clear()
        for held, keys in dicts:
            for key in [key for key in held if key not in keys and _is_meta(held[key])]:
                del held[key]


def _values(model: nn.Module) -> Iterator[Any]:
    """Yield the values of the source files and class bodies of a model's classes, each once."""
    kinds = {base for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    kinds = {kind for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES}
    files = [sys.modules[name] for name in sorted({kind.__module__ for kind in kinds}) if name in sys.modules]
    seen: set[int] = set()
    for holder in (*files, *kinds):
        for value in list(vars(holder).values()):
            inner: Any = cast("Any", value).__func__ if isinstance(value, staticmethod | classmethod) else value
            if id(inner) not in seen:
                seen.add(id(inner))
                yield inner


def _is_meta(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in tree_leaves(value))
