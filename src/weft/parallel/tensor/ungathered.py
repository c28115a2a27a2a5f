"""All tokens of activations that are not gathered yet.

A module in front of cut layers is given these where they gather in pieces: it may ask for shape and format, and hands
them to the layers. What else it does with them brings them together first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.autograd import gather_from
from weft.errors import PlanError
from weft.mesh import Axis
from weft.parallel.private_torch import plain_call, without_memory
from weft.private_torch import tree_map_only

#: Where the tokens are in activations: (batch, tokens, features).
TOKENS = 1

_untyped: Any = Tensor
#: What may be asked of them as they are.
_ASKED = {
    *(getattr(_untyped, name).__get__ for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout")),
    *(getattr(_untyped, name) for name in ("size", "dim", "numel", "is_floating_point", "__len__")),
}


class Ungathered(Tensor):
    """The ranks' tokens, (B, T, D), or (B * T, D) where is_flat; each rank has (B, S, D) of them."""

    _own: Tensor
    _axis: Axis
    _is_flat: bool
    _whole: Tensor | None
    _has_grad: bool

    @staticmethod
    def of(x_BSD: Tensor, axis: Axis, *, is_flat: bool) -> Ungathered:
        """Stand for what is gathered from x."""
        batch, tokens, width = x_BSD.shape
        shape = (batch * axis.size * tokens, width) if is_flat else (batch, axis.size * tokens, width)
        found: Any = without_memory(Ungathered, shape, x_BSD)
        found._own, found._axis, found._is_flat, found._whole = x_BSD, axis, is_flat, None
        found._has_grad = torch.is_grad_enabled() and x_BSD.requires_grad
        return found

    def whole(self) -> Tensor:
        """Bring them together, once.

        Raises:
            PlanError: inside of a step of autograd, through which their gradient would not come back.
        """
        if self._whole is None:
            if self._has_grad and not torch.is_grad_enabled():
                raise _hidden()
            found = gather_from(self._own, self._axis, TOKENS)
            self._whole = found.flatten(0, 1) if self._is_flat else found
        return self._whole

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func in _ASKED:
            return plain_call(func, args, kwargs or {})
        if func is _untyped.requires_grad.__get__:
            return args[0]._has_grad
        args, kwargs = tree_map_only(cls, cls.whole, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del func, types, args, kwargs
        raise _hidden()


def _hidden() -> PlanError:
    return PlanError(
        "tp_chunks: a module around cut layers hands its input to a step of autograd of its own, or reads it without "
        "gradients, before they have gathered it. Use tp_chunks=1."
    )
