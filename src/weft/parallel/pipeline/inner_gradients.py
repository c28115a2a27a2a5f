"""Check of gradients that a module of a later pipeline stage computes in its forward (forces, inner updates).

Received tensors have no autograd history. So a gradient with respect to a tensor on which they depend would lack the
part that passes through earlier stages. These gradients are refused.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from weft.errors import ModelError


class PartialGradient(ModelError):
    """Raised if a module computes a gradient in its forward, and a part of it is on other stages."""

    def __init__(self, path: str):
        super().__init__(
            f"pp: {path!r} takes a gradient by a tensor that modules of earlier stages also read, and their part of it "
            "is on other stages. Take it by x.detach().requires_grad_() if it is the gradient of this module alone, or "
            "use pp=1."
        )


@contextmanager
def partial_gradients_refused(
    path: str, args: Sequence[Tensor], given: Mapping[int, Tensor], received: Sequence[Tensor],
    tied: Sequence[Tensor] = (),
) -> Generator[None]:  # fmt: skip
    """Within the context, refuse gradients that would lack the part that passes through earlier stages.

    These are gradients with respect to `given` or `tied` of results that depend on `received`. At the end, tensors of
    `given` in `args` on which the module enabled requires_grad are refused too.

    Raises PartialGradient. With gradients disabled, the graph does not show whether a result depends on received
    tensors, so a plain ModelError is raised, and the check of the first batch repeats the forward with gradients.

    Args:
        path: path of the module that runs.
        args: its tensor arguments.
        given: tensors of this stage that modules of earlier stages also read, by id.
        received: tensors that earlier stages computed.
        tied: the module's parameters that modules of earlier stages also have. Nothing is refused if `given` is empty
            too.
    """
    fixed = [each for each in args if id(each) in given and not each.requires_grad]
    used = _edges([*given.values(), *tied])
    is_read = bool(tied) or (bool(used) and not used.isdisjoint(_edges(args, deep=False)))
    with _InnerGradients(path, used, received) if is_read else nullcontext():
        yield
    if any(each.requires_grad for each in fixed):
        raise PartialGradient(path)


class _InnerGradients(TorchFunctionMode):
    def __init__(self, path: str, used: set[Any], received: Sequence[Tensor]):
        super().__init__()
        self._path, self._used, self._is_known = path, used, torch.is_grad_enabled()
        self._received = [each for each in received if each.is_floating_point()]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            self._check(args[0], _edges(args[1], deep=False))
        elif func in (Tensor.backward, torch.autograd.backward):
            self._check([args[0]] if isinstance(args[0], Tensor) else args[0], self._used)
        return func(*args, **kwargs)

    def _check(self, outputs: Sequence[Tensor | GradientEdge], inputs: set[Any]) -> None:
        if self._used.isdisjoint(inputs):
            return
        if not self._is_known:
            raise ModelError(f"pp: {self._path!r} takes a gradient in a forward without gradients.")
        # Frozen stages send tensors without a gradient, and may still depend on the input.
        is_free = all(each.requires_grad for each in self._received)
        if not is_free or not _edges(outputs).isdisjoint(_edges(self._received, deep=False)):
            raise PartialGradient(self._path)


def _edges(tensors: Iterable[Tensor | GradientEdge], *, deep: bool = True) -> set[tuple[Any, int]]:
    """Return the edges of the autograd graph at these tensors, and if deep also all edges that they depend on."""
    found: set[tuple[Any, int]] = set()
    waiting: list[tuple[Any, int]] = []
    for each in tensors:
        if isinstance(each, GradientEdge):
            waiting.append((each.node, each.output_nr))
        elif each.requires_grad:
            waiting.append((each.grad_fn or each, each.output_nr))
    while waiting:
        node, number = waiting.pop()
        if type(node).__name__ == "AccumulateGrad":
            node = node.variable  # a leaf, by its tensor
        if node is not None and (node, number) not in found:
            found.add((node, number))
            waiting += getattr(node, "next_functions", ()) if deep else ()
    return found
