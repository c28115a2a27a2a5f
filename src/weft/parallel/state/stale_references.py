"""Detection of references to parameters from before parallelize. They raise an error when a forward uses them.

`parallelize` moves parameters to other memory, and under zero=3 and tp replaces the parameter objects in their modules.
A view from before (`self.w_t = self.linear.weight.t()`) or another holder of a replaced object (a Python list, a
closure, a Keras variable) keeps the old values. A model that computes with them trains with stale weights.

Before parallelize moves or replaces parameters, it takes weak references to each parameter and its memory. If one of
them is still alive afterwards and is not the parameter itself, an object outside the modules refers to it. Only then is
the first forward watched: keeping such a reference is allowed, for example in a list for an optimizer's groups, but
computing with it is not.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from weft.errors import ModelError
from weft.private_torch import hooks_of_parameter, tree_leaves, uncompiled

_ATTRIBUTE = "_weft_stale_references"
#: Methods and properties that do not read a tensor's values.
_NO_VALUES = frozenset({
    "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "get_device",
    "data_ptr",
    "is_floating_point", "is_complex", "is_contiguous", "untyped_storage", "requires_grad_", "__hash__", "__repr__",
    "__len__", "__str__", "__format__", "register_hook",
})  # fmt: skip
#: Properties that return a view.
_VIEWS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
_DEPTH = 6  # nesting of containers and objects in the search for a reference's holder


class OriginalParameters:
    """Weak references to a model's trained parameters and their memory, taken before they are moved or replaced."""

    def __init__(self, model: nn.Module):
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad and not param.is_meta}
        self._objects = {name: weakref.ref(param) for name, param in trained.items()}
        self._hooked = [name for name, param in trained.items() if any(hooks_of_parameter(param))]
        named = reversed(trained.items())  # reversed, so that the first of several in one storage remains
        self._storages = {_memory(param): (name, _address(param)) for name, param in named if _has_memory(param)}
        self._buffers = [
            (weakref.ref(module), key, self._storages[_memory(buffer)][0])
            for module in model.modules()
            for key, buffer in module.named_buffers(recurse=False)
            if _has_memory(buffer) and _memory(buffer) in self._storages
        ]

    def watch(self, model: nn.Module, compiles: bool) -> None:
        """Make the first forward raise ModelError if it uses old values. Does nothing if no references to them exist.

        model: the model after parallelize. compiles: True if blocks are compiled; the watched forward then runs
        uncompiled. Raises ModelError for a hook of a parameter that was replaced.
        """
        named = dict(model.named_parameters())
        for name in self._hooked:
            if name in named and named[name] is not self._objects[name]():
                raise ModelError(hook_refusal(name))
        current = list(model.parameters())
        here = {id(param) for param in current}
        memory = {_memory(one) for one in map(_local, current) if _has_memory(one)}
        objects = {
            name: ref for name, ref in self._objects.items() if (old := ref()) is not None and id(old) not in here
        }
        storages = {key: old for key, old in self._storages.items() if not key.expired() and key not in memory}
        for owner, key, name in self._buffers:
            module = owner()
            buffer = None if module is None else dict(module.named_buffers(recurse=False)).get(key)
            if buffer is not None and _has_memory(buffer):
                storages[_memory(buffer)] = name, _address(buffer)
        if objects or storages:
            stale = StaleReferences(model, objects, storages, compiles)
            setattr(model, _ATTRIBUTE, stale)
            model.register_forward_pre_hook(stale.before_forward)
            model.register_forward_hook(stale.after_forward, always_call=True)

    @staticmethod
    def refusing_old(model: nn.Module) -> AbstractContextManager[None]:
        """Return a context that watches forward and loss of a train step's microbatch, if the model is watched."""
        stale = watched_references(model)
        return nullcontext() if stale is None else stale.watching()


def hook_refusal(name: str) -> str:
    """Return the error text for a parameter hook that would not run."""
    return (
        f"parameter {name}: it has a hook, and zero=3 and tp replace parameters, so the hook does not run. Use zero=2 "
        "and tp=1, or change the gradient in forward, as a parametrization or a custom autograd function does."
    )


class StaleReferences:
    """Watches one model's first training forward and first evaluation for uses of old parameters.

    model: the model after parallelize. objects: replaced parameters, by name. storages: for each old memory, (name of
    the parameter to which it belonged, address).
    """

    def __init__(
        self,
        model: nn.Module,
        objects: Mapping[str, weakref.ref[nn.Parameter]],
        storages: Mapping[StorageWeakRef, tuple[str, int]],
        compiles: bool,
    ):
        self._model = weakref.ref(model)
        self._objects = {id(ref()): (ref, name) for name, ref in objects.items()}
        self._storages, self._compiles = {key: name for key, (name, _) in storages.items()}, compiles
        self._addresses = {address: (key, name) for key, (name, address) in storages.items() if address}
        self._watched: set[bool] = set()  # values of model.training that were watched
        self._depth = 0
        self._own_pass: ExitStack | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return StaleReferences, (nn.Module(), {}, {}, False)  # a copy has separate parameters

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the context, raise ModelError for an operation on an old parameter."""
        self._depth += 1
        try:
            with ExitStack() as stack:
                if self._compiles:
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(_Watch(self))
                yield
        finally:
            self._depth -= 1
        self._watched.add(True)

    @uncompiled
    def before_forward(self, model: nn.Module, args: Any) -> None:
        """Begin to watch a forward outside train steps, the first in training mode and the first in eval mode."""
        del args
        if not self._depth and model.training not in self._watched and (self._objects or self._storages):
            self._own_pass = ExitStack()
            self._own_pass.enter_context(self.watching())

    @uncompiled
    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """End the watch, and check the output's autograd graph. output: the forward's output, or None if it raised."""
        del args
        own, self._own_pass = self._own_pass, None
        if own is not None:
            failed, watched = output is None, set(self._watched)
            own.close()
            self._watched = watched if failed else watched | {model.training}
            self.check_graph(output)

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of the parameter whose old values a tensor holds, or None."""
        ref, name = self._objects.get(id(tensor), (None, None))
        if ref is not None and ref() is tensor:
            return name
        if not _has_memory(tensor):
            return None
        # Compare addresses too: numpy arrays and DLPack give tensors another storage on the same memory.
        name = self._storages.get(_memory(tensor))
        key, at_address = self._addresses.get(_address(tensor), (None, None))
        return at_address if name is None and key is not None and not key.expired() else name

    def check_graph(self, output: Any) -> None:
        """Raise ModelError if the output's gradients reach an old parameter."""
        nodes = [one.grad_fn for one in tree_leaves(output) if isinstance(one, Tensor) and one.grad_fn is not None]
        for variable in _variables(nodes):
            if self.name_of(variable) is not None:
                self.refuse(variable)

    def refuse(self, tensor: Tensor) -> None:
        """Raise ModelError for a tensor with old values. The message names the parameter and how the model uses it."""
        name, model = self.name_of(tensor), self._model()
        how = None if model is None else next(iter(_holders(model, self, name)), None)
        reached = f"through {how}" if how else "from outside its modules, such as a global variable"
        raise ModelError(
            f"model: parameter {name} is used {reached}, which still has the values of before parallelize, so training "
            "would not reach it. Read the parameter from its module in each forward, such as self.linear.weight.t()."
        )


class _Watch(TorchFunctionMode):
    """Checks the tensors that are passed to torch functions."""

    def __init__(self, stale: StaleReferences):
        super().__init__()
        self._stale = stale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            self._stale.check_graph(args[0])
        elif _reads_values(func):
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor) and self._stale.name_of(one) is not None:
                    self._stale.refuse(one)
        return func(*args, **kwargs)


def watched_references(model: nn.Module) -> StaleReferences | None:
    """Return the object that watches the model for old parameters, or None if `parallelize` found no references."""
    return getattr(model, _ATTRIBUTE, None)


def _reads_values(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in _VIEWS
    return name not in _NO_VALUES and name not in ("__set__", "__delete__")


def _local(param: Tensor) -> Tensor:
    local = getattr(param, "_local_tensor", None)
    return param if local is None else cast("Tensor", local)


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided and not tensor.is_meta


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _holders(model: nn.Module, stale: StaleReferences, name: str | None) -> Iterator[str]:
    """Yield descriptions, as in `_parts`, of where the model's modules refer to old values of a parameter."""
    done: set[int] = {id(stale)}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_modules") or key.startswith("_weft"):
                continue
            if key != "_buffers":
                yield from _references(value, f"{path}.{key}" if path else key, stale, name, done, 0)
        for key, buffer in module.named_buffers(path, recurse=False):
            yield from _references(buffer, f"buffer {key}", stale, name, done, 0)
        methods = [value for kind in type(module).__mro__ for value in vars(kind).values() if kind is not nn.Module]
        for method in methods:
            if isinstance(method, FunctionType):
                yield from _references(method, f"{path or 'the model'}.{method.__name__}", stale, name, done, 0)


def _references(
    value: Any, what: str, stale: StaleReferences, name: str | None, done: set[int], depth: int
) -> Iterator[str]:
    if isinstance(value, Tensor):
        node = value.grad_fn
        if stale.name_of(value) == name or any(
            stale.name_of(one) == name for one in _variables([node] if node is not None else [], most=1000)
        ):
            yield what
        return
    if depth > _DEPTH or id(value) in done or isinstance(value, nn.Module | type | str | bytes | int | float):
        return
    done.add(id(value))
    for inner, part in _parts(value, what):
        yield from _references(part, inner, stale, name, done, depth + 1)


def _parts(value: Any, what: str) -> Iterator[tuple[str, Any]]:
    """Yield (description, object) for each object that `value` references.

    These are items, attributes, arguments of a partial, and a function's closure variables, defaults and globals.

    A description is a Python expression such as `model.layers[0]`, or text such as 'variable x of f'.
    """
    if isinstance(value, Mapping):
        yield from ((f"{what}[{key!r}]", part) for key, part in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{what}[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from ((f"an argument of {what}", part) for part in (*value.args, *value.keywords.values()))
        yield what, value.func
    elif isinstance(value, MethodType):
        yield what, value.__func__
        yield what, value.__self__
    elif isinstance(value, FunctionType):
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with_value = getattr(cell, "cell_contents", None)
            yield f"variable {variable} of {what}", with_value
        yield from ((f"a default of {what}", part) for part in value.__defaults__ or ())
        yield from ((f"default {key} of {what}", part) for key, part in (value.__kwdefaults__ or {}).items())
        used = set(value.__code__.co_names) & value.__globals__.keys()
        yield from (
            (f"global {key}", value.__globals__[key])
            for key in sorted(used)
            if isinstance(value.__globals__[key], Tensor | list | tuple | dict | functools.partial)
        )
    elif hasattr(value, "__dict__"):
        yield from ((f"{what}.{key}", part) for key, part in list(vars(value).items()))


def _variables(nodes: list[Any], most: float = math.inf) -> Iterator[Tensor]:
    """Yield the leaf tensors of an autograd graph. nodes: where to begin; emptied. most: maximum number of nodes."""
    known = set(nodes)
    while nodes and len(known) < most:
        node = nodes.pop()
        if isinstance(variable := getattr(node, "variable", None), Tensor):
            yield variable
        for following, _ in node.next_functions:
            if following is not None and following not in known:
                known.add(following)
                nodes.append(following)
