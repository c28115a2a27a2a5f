"""Shapes of a module's outputs, from one call of a copy on the meta device.

A module that cannot run on meta, such as experts that count tokens, is called once with zeros. If that fails too, it is
called with its real arguments and zero weights, for every microbatch. If that also fails, its output is assumed to have
the shape and dtype of its first argument. The stage that holds the module verifies this (`check`).

A module must return a tensor, a tuple, a dict or a dataclass. Side effects are detected too. Attributes that the module
sets (`self.aux`) count as outputs. A module that stores a tensor elsewhere or changes its arguments is rejected.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.data.batches import map_tensors, parts_of, tensors_in
from weft.errors import ModelError
from weft.models.inspect import hugging_face
from weft.parallel.pipeline.remote import RemoteTensor, is_remote, to_meta
from weft.parallel.private_torch import without_overrides
from weft.private_torch import TorchDispatchMode, storage_key, version_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True)
class Returned:
    """Outputs of a call on the meta device.

    Attributes:
        value: the return value.
        set_tensors: attributes with tensors that the call set, by (path in the module, name).
        set_others: other attributes that it changed.
        is_guess: True if the output is unknown, and assumed to be like the first argument.
    """

    value: Any
    set_tensors: tuple[tuple[tuple[str, str], Any], ...] = ()
    set_others: tuple[tuple[str, str], ...] = ()
    is_guess: bool = False


class Probe:
    """Calls a module of the copied model without values, once per structure, shapes and dtypes of its arguments."""

    def __init__(self, module: nn.Module, path: str):
        self.module, self.path = module, path
        self.state: set[tuple[str, str]] = set()  # attributes without tensors that its calls change
        self.guesses = False
        self.inner_modules: dict[str, nn.Module] = {}  # placeholders of its submodules, by path
        self._returns_first = False
        self._needs_numbers = False  # its calls work with real arguments only, so nothing is cached
        self._known: dict[Any, Returned] = {}

    def returned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned:
        """Return the outputs for arguments of this structure, shapes and dtypes.

        Raises ModelError for side effects that would be lost on other stages, or if the outputs are unknown.
        """
        with without_overrides():  # shapes and dtypes of remote tensors need no emulation
            form = self.module.training, _form((args, kwargs))
        if form in self._known:
            return self._known[form]
        found = self._call(args, kwargs)
        if not self._needs_numbers:
            self._known[form] = found
        self.state.update(found.set_others)
        return found

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned:
        if self._returns_first:
            return self._guessed(args, kwargs)
        found = None
        if not self._needs_numbers:
            found = self._attempt(self.module, _without_caches(map_tensors(_plain, (args, kwargs))), on_meta=True)
            if found is None:
                found = self._with_zeros(args, kwargs)
            if found is not None:
                return found
        if not any(is_remote(each) or each.is_meta for each in tensors_in((args, kwargs))):
            found = self._with_numbers(args, kwargs)
            self._needs_numbers = found is not None
        return self._guessed(args, kwargs) if found is None else found

    def _with_zeros(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned | None:
        module, device = self._zero_copy(args, kwargs)

        def zeros(tensor: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(_plain(tensor), device=device)

        given = _without_caches(map_tensors(zeros, (args, kwargs)))
        first = next(tensors_in(given), None)
        found = self._attempt(module, given, on_meta=False)
        if found is not None and isinstance(found.value, torch.Tensor) and first is not None:
            is_alike = found.value.shape == first.shape and not found.set_tensors and not found.set_others
            self._returns_first = is_alike
        return found

    def _with_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Returned | None:
        """Call a copy of the module with weights of zeros and copies of the real arguments."""
        module, _ = self._zero_copy(args, kwargs)
        given = _without_caches(map_tensors(lambda tensor: tensor.detach().clone(), (args, kwargs)))
        return self._attempt(module, given, on_meta=False)

    def _zero_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[nn.Module, torch.device]:
        device = next((each.device for each in tensors_in((args, kwargs))), torch.device("cpu"))
        memo: dict[int, Any] = {
            id(each): nn.Parameter(torch.zeros_like(each, device=device), requires_grad=False)
            if isinstance(each, nn.Parameter) else torch.zeros_like(each, device=device)
            for each in _attribute_tensors(self.module)
        }  # fmt: skip
        return copy.deepcopy(self.module, memo), device

    def _attempt(self, module: nn.Module, given: Any, *, on_meta: bool) -> Returned | None:
        """Call a module and return its outputs and attribute changes. Return None if the call fails.

        Raises ModelError if it writes to an argument, or stores a tensor outside itself.
        """
        before, sizes = _attributes(module), _sizes(given)
        versions = [(each, version_of(each)) for each in tensors_in(given)]
        objects = [(each, dict(vars(each))) for each in _objects(given)]
        with _Made() as made:
            try:  # without the graph that a module builds for a gradient of its own
                value = map_tensors(torch.Tensor.detach, _run(module, *given, on_meta=on_meta))
            except ModelError:
                raise
            except Exception:  # the model's own code, called without values
                return None
        changed = any(version_of(each) != version for each, version in versions) or _sizes(given) != sizes
        if changed or any(vars(each) != was for each, was in objects):
            raise ModelError(
                f"pp: {self.path!r} changes one of its arguments in place, which does not reach other stages. Return "
                "the new value instead, or use pp=1."
            )
        tensors, others = _changes(module, before)
        outputs = [*tensors_in(value), *(each for _, found in tensors for each in tensors_in(found))]
        if made.outlives([*outputs, *tensors_in(given), *_attribute_tensors(module)]):
            raise ModelError(
                f"pp: {self.path!r} leaves a tensor outside itself, such as in a list of losses, which does not "
                "reach other stages. Return it, or set it as an attribute of the module, or use pp=1."
            )
        return Returned(map_tensors(to_meta, value), tensors, others)

    def _guessed(self, args: Any, kwargs: Any) -> Returned:
        first = next(tensors_in((args, kwargs)), None)
        if first is None:
            raise ModelError(
                f"pp: {self.path!r} cannot be called without values, so its output is unknown on other stages. Use "
                "pp=1."
            )
        self.guesses = True
        return Returned(_plain(first), is_guess=True)

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Compare the module's real output with a guess that other stages made. Raises ModelError if they differ."""
        expected = next(tensors_in((args, kwargs)), None)
        is_alike = isinstance(output, torch.Tensor) and expected is not None and output.shape == expected.shape
        if self.guesses and not is_alike:
            raise ModelError(
                f"pp: {self.path!r} cannot be called without values and does not return a tensor of the shape of its "
                "first argument, so its output is unknown on other stages. Use pp=1."
            )


def _run(module: nn.Module, args: Any, kwargs: Any, *, on_meta: bool) -> Any:
    device = torch.device("meta") if on_meta else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), device, hugging_face.experts_at_once(module):
        return module(*args, **kwargs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return to_meta(tensor.received if isinstance(tensor, RemoteTensor) and tensor.received is not None else tensor)


def _without_caches(value: Any) -> Any:
    """Replace key-value caches with None, because a call on the meta device must not fill a cache."""
    if isinstance(value, dict):
        return {name: _without_caches(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map(_without_caches, value))
    return None if hugging_face.is_cache(value) else value


def _form(value: Any) -> Any:
    """Return a hashable description of the arguments' structure, shapes and dtypes."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return tuple((str(name), _form(each)) for name, each in value.items())
    if (parts := parts_of(value)) is not None:
        return type(value), *map(_form, parts)
    return value if isinstance(value, _PLAIN) else type(value)


def _sizes(value: Any) -> list[int]:
    parts = parts_of(value)
    return [] if parts is None else [len(parts), *(size for part in parts for size in _sizes(part))]


def _objects(value: Any) -> Iterator[Any]:
    """Yield the arguments that are neither tensors nor containers: a module may change their attributes."""
    parts = parts_of(value)
    for part in parts or ():
        yield from _objects(part)
    is_other = parts is None and not isinstance(value, (*_PLAIN, torch.Tensor, nn.Module, type))
    if is_other and hasattr(value, "__dict__") and not callable(value):
        yield value


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the attributes of a module and its submodules that are no parameters, buffers or modules. Copies lists."""
    found: dict[tuple[str, str], Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_"):
                found[path, name] = list(value) if isinstance(value, list) else value
            if name.startswith("_") and not isinstance(value, dict):
                found[path, name] = list(value) if isinstance(value, list) else value
    return found


def _changes(
    module: nn.Module, before: dict[tuple[str, str], Any]
) -> tuple[tuple[tuple[tuple[str, str], Any], ...], tuple[tuple[str, str], ...]]:
    """Return the attributes that a call changed: those that hold tensors now, and all others."""
    tensors: list[tuple[tuple[str, str], Any]] = []
    others: list[tuple[str, str]] = []
    missing = object()
    for key, value in _attributes(module).items():
        was = before.get(key, missing)
        if was is value or (isinstance(value, list) and isinstance(was, list) and _is_same(value, was)):
            continue
        if not isinstance(value, list) and next(tensors_in(value), None) is not None:
            tensors.append((key, map_tensors(to_meta, value)))
        elif isinstance(value, torch.Tensor | list) or was is missing or type(was) is not type(value) or was != value:
            others.append(key)
    return tuple(tensors), tuple(others)


def _is_same(value: list[Any], was: list[Any]) -> bool:
    return len(value) == len(was) and all(one is other for one, other in zip(value, was, strict=True))


def _attribute_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
    for part in module.modules():
        for value in vars(part).values():
            yield from tensors_in(value)


class _Made(TorchDispatchMode):
    """Mode that records the tensors that are created while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(each) for each in tensors_in(made)]
        return made

    def outlives(self, known: list[torch.Tensor]) -> bool:
        """Return True if a recorded tensor is still alive and shares no memory with the given tensors."""
        with contextlib.suppress(NotImplementedError):
            storages = {storage_key(each.untyped_storage()) for each in known}
            if self._is_outside(storages):
                gc.collect()  # frames of an exception that was caught may be in a cycle
                return self._is_outside(storages)
        return False

    def _is_outside(self, storages: set[Any]) -> bool:
        alive = [each for reference in self._made if (each := reference()) is not None]
        return any(storage_key(each.untyped_storage()) not in storages for each in alive)
