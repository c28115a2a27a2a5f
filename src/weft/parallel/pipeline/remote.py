"""Tensors of other stages: they have a shape and a dtype, but no values on this stage.

The forward of a stage is the model's own code. Modules of other stages return a `RemoteTensor`. Operations on remote
tensors return remote tensors, also below autograd: `detach`, `data` and `no_grad` do not change this. Reading a value,
or writing it into a tensor of this stage, raises an error. So no result silently contains a value of another stage.

After the stage receives the values (`receive`), a remote tensor acts as the received tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from weft.data.batches import map_tensors, tensors_in
from weft.errors import ModelError
from weft.parallel.private_torch import without_overrides
from weft.private_torch import version_of

_created = count()
_T = torch.Tensor

#: Functions that create a tensor like a given one without reading its values.
_FACTORIES = frozenset(
    {torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like,
     torch.randint_like, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_empty, _T.new_tensor}
)  # fmt: skip
#: Functions that read only shape or dtype of their second tensor.
_LIKE: dict[Any, Callable[[Any, Any], Any]] = {
    _T.type_as: lambda x, other: x.to(other.dtype),
    _T.to: lambda x, other: x.to(other.dtype),
    _T.expand_as: lambda x, other: x.expand(other.shape),
    _T.view_as: lambda x, other: x.view(other.shape),
    _T.reshape_as: lambda x, other: x.reshape(other.shape),
}
_MOVES = frozenset({_T.to, _T.cpu, _T.cuda})
#: Properties that a remote tensor reads from its meta tensor.
_FORM_GETTERS: frozenset[Any] = frozenset(getattr(_T, name).__get__ for name in ("shape", "dtype", "ndim"))


class RemoteTensor(torch.Tensor):
    """A tensor that another stage computes, on the meta device. See the docstring of this file.

    Attributes:
        source: path of the module that computes it, or "" for a weight that every stage has.
        value: (index of the call, index among the call's outputs) for an output of a module, else None.
        real_device: the device that it reports.
        received: the tensor's values, once the stage has received them, else None.
        parents: the remote tensors that it depends on.
        used: tensors of this stage that require a gradient and on which it depends.
        created: its creation order.
    """

    source: str
    value: tuple[int, int] | None
    real_device: torch.device
    received: torch.Tensor | None
    parents: tuple[RemoteTensor, ...]
    used: tuple[torch.Tensor, ...]
    created: int

    @staticmethod
    def of(meta: torch.Tensor, device: torch.device, source: str, parents: Iterable[RemoteTensor] = ()) -> RemoteTensor:
        """Return a remote tensor.

        Args:
            meta: gives shape and dtype.
            device: reported as its device.
            source: path of the module that computes it.
            parents: the remote tensors that it depends on.
        """
        with without_overrides():
            made = meta.detach().as_subclass(RemoteTensor)
            made.source, made.value, made.real_device, made.received = source, None, device, None
            made.parents, made.created = tuple(parents), next(_created)
            made.used = tuple(dict.fromkeys(each for parent in made.parents for each in parent.used))
        return made

    def receive(self, tensor: torch.Tensor) -> None:
        """Set the received values. Later operations use them."""
        self.received = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FORM_GETTERS and is_remote(args[0]):
            with without_overrides():
                return func(*args)
        args, kwargs = map_tensors(local, args), map_tensors(local, kwargs or {})
        tensors = tensors_in((args, kwargs))
        remote = [each for each in tensors if isinstance(each, RemoteTensor) and is_remote(each)]
        if not remote:
            return func(*args, **kwargs)
        return _without_numbers(func, args, kwargs, remote)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        with without_overrides():
            return f"RemoteTensor({tuple(self.shape)}, {self.dtype}, source={self.source!r})"


def is_remote(value: Any) -> bool:
    """Return True if a value is a remote tensor whose values were not received."""
    return isinstance(value, RemoteTensor) and value.received is None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the received values if the tensor is remote and has them, else the tensor itself."""
    return tensor.received if isinstance(tensor, RemoteTensor) and tensor.received is not None else tensor


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape, strides and dtype."""
    with without_overrides():
        if tensor.is_meta:
            return tensor.detach().as_subclass(torch.Tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def refuse(remote: RemoteTensor, use: str) -> ModelError:
    """Return the error for an operation that needs the values of `remote`. use: the operation, for the message."""
    if not remote.source:
        return ModelError(
            f"pp: {use}, which follows from a weight outside the blocks. Move this into a block, or use pp=1."
        )
    return ModelError(
        f"pp: {use}, which follows from the output of {remote.source!r} on another stage. A stage receives what its "
        f"first block is called with, and outputs of modules that it reads. Move this into the blocks, or use pp=1."
    )


def _without_numbers(func: Any, args: Any, kwargs: Any, remote: list[RemoteTensor]) -> Any:
    """Return the result of a torch function with remote arguments, computed on the meta device.

    Returned tensors are remote, except if the function needs only shape, dtype or device of its remote arguments.
    """
    device = remote[0].real_device
    name = getattr(func, "__name__", str(func))
    if func == _T.device.__get__:  # pyright: ignore[reportAttributeAccessIssue] - a descriptor
        return device
    if name == "__get__" and (flag := _device_flags(func, device)) is not None:
        return flag
    if func is _T.register_hook:  # the hook runs on the stages that have the value
        return RemovableHandle(OrderedDict())
    if func in _LIKE and not is_remote(args[0]) and len(args) > 1 and is_remote(args[1]):
        with without_overrides():
            return _LIKE[func](args[0], args[1])
    if func in _FACTORIES and is_remote(args[0]) and len(remote) == 1:
        with without_overrides():
            return func(*args, **{"device": device, **kwargs})
    if func in _MOVES:
        args, kwargs, device = _moved(args, kwargs, device)
        if len(args) == 1 and not kwargs.get("dtype"):
            return args[0]
    return _on_meta(func, name, args, kwargs, remote, device)


def _on_meta(
    func: Any, name: str, args: Any, kwargs: Any, remote: list[RemoteTensor], device: torch.device
) -> Any:  # fmt: skip
    metas: list[tuple[torch.Tensor, int]] = []

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, RemoteTensor):
            return tensor
        made = to_meta(tensor)
        metas.append((made, version_of(made)))
        return made

    used = tuple(
        each for each in tensors_in((args, kwargs)) if not isinstance(each, RemoteTensor) and each.requires_grad
    )
    with without_overrides(), torch.no_grad():
        args, kwargs = map_tensors(replaced, args), map_tensors(replaced, kwargs)
        versions = [version_of(each) for each in remote]
        try:
            made = func(*args, **kwargs)
        except Exception as error:  # any torch function may fail without values, with any error
            raise refuse(remote[0], f"forward calls {name} on a value ({_first_line(error)})") from error
        if any(version_of(each) != version for each, version in metas):
            raise refuse(remote[0], f"forward writes a value into a tensor of this stage ({name})")
        for each, version in zip(remote, versions, strict=True):
            if version_of(each) != version:
                each.parents = (*each.parents, *(other for other in remote if other is not each))
                each.created, each.used = next(_created), (*each.used, *used)
    parents = tuple(remote)

    def wrapped(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, RemoteTensor):
            return tensor
        found = RemoteTensor.of(tensor, device, remote[0].source, parents)
        found.used += used
        return found

    return iter([wrapped(each) for each in made]) if isinstance(made, Iterator) else map_tensors(wrapped, made)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")[:80]


def _device_flags(func: Any, device: torch.device) -> bool | None:
    """Return is_cpu, is_cuda or is_meta of the real device, or None for another attribute."""
    for kind in ("cpu", "cuda", "meta"):
        if func == getattr(_T, f"is_{kind}").__get__:
            return device.type == kind
    return None


def _moved(args: Any, kwargs: Any, device: torch.device) -> tuple[Any, Any, torch.device]:
    """Return the arguments of `to`, `cpu` or `cuda` without the target device, and the target device.

    Remote tensors have no values to move.
    """

    def is_device(value: Any) -> bool:
        return isinstance(value, torch.device) or (isinstance(value, str) and not isinstance(value, torch.dtype))

    target = next((each for each in (*args[1:], kwargs.get("device")) if is_device(each)), device)
    kept = tuple(each for each in args if not is_device(each))
    return kept, {name: each for name, each in kwargs.items() if name != "device"}, torch.device(target)
