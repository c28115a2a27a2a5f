"""What the modules of a rank gave in some forwards: how large, and whether it was finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.data.batch import tensors_in


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One module's output in one forward. size: root mean square. input_size: of what it got. Not finite: so was it."""

    module: str
    size: float
    input_size: float

    @property
    def is_finite(self) -> bool:
        """Whether the output was finite."""
        return math.isfinite(self.size)


@dataclass
class ModuleWatch:
    """Looks at every module of a model through hooks; numbers stay on the device until `calls` asks for them."""

    model: nn.Module
    _names: list[list[str]] = field(default_factory=list)
    _sizes: list[list[torch.Tensor]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the forwards inside; compiled modules run as they are written."""
        hooks = [
            module.register_forward_hook(self._hook(own_name(name)))
            for name, module in self.model.named_modules()
            if module is not self.model
        ]
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def each(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Give batches one after another: what modules give until the next one is of this one."""
        for batch in batches:
            self._names.append([])
            self._sizes.append([])
            yield batch

    def calls(self) -> list[list[ModuleCall]]:
        """Return what was seen of each batch, in the order in which modules ended. Waits for the device."""
        found = []
        for names, sizes in zip(self._names, self._sizes, strict=True):
            numbers: list[list[float]] = torch.stack(sizes).tolist() if sizes else []
            found.append([ModuleCall(name, *pair) for name, pair in zip(names, numbers, strict=True)])
        return found

    def _hook(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            del module
            size = size_of(output)
            if size is not None and self._names:
                given = size_of(args)
                self._names[-1].append(name)
                self._sizes[-1].append(torch.stack([size, torch.zeros_like(size) if given is None else given]))

        return look


def size_of(value: Any) -> torch.Tensor | None:
    """Root mean square of all floating-point values of a nested value, on its device, float64; None of no such values.

    Not finite where one of them is not.
    """
    squares, count = None, 0
    for tensor in map(local_part, tensors_in(value)):
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            # In float64, where the squares of what is large in other formats are finite.
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
            squares = norm.square() + (0.0 if squares is None else squares)
            count += tensor.numel()
    return None if squares is None else (squares / count).sqrt()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that is spread over ranks."""
    here: Any = getattr(tensor, "to_local", None)
    return tensor if here is None else here()


def own_name(name: str) -> str:
    """The name that a module has in the model's own code, without what compiling puts around it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def spoilt_parameters(model: nn.Module) -> list[str]:
    """List the parameters of which this rank holds values that are not finite."""
    return _not_finite((name, param) for name, param in model.named_parameters())


def spoilt_gradients(model: nn.Module, whole: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """List the parameters of this rank whose gradient has values that are not finite anywhere, in the model's order.

    whole: the whole gradients by name.
    """
    bad = set(_not_finite(whole))
    return [name for name in map(own_name, dict(model.named_parameters())) if name in bad]


def _not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    found = [(name, size_of(tensor)) for name, tensor in tensors]
    known = [(own_name(name), size) for name, size in found if size is not None]
    if not known:
        return []
    sizes: list[float] = torch.stack([size for _, size in known]).tolist()
    return [name for (name, _), size in zip(known, sizes, strict=True) if not math.isfinite(size)]
