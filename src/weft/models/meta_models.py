"""Models built as shapes: what is too large for one rank is cut before it has values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

#: What initialisers draw with, as methods or in torch.nn.init, whose other functions call these. By name: libraries put
#: functions of their own there. On the meta device each call runs a decomposition in Python, for nothing.
_DRAWS = frozenset({"normal_", "uniform_", "kaiming_uniform_"})


class _WithoutDraws(TorchFunctionMode):
    """Leaves tensors without memory as they are where random numbers would fill them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWS and (filled := args[0] if args else named["tensor"]).is_meta:
            return filled
        return func(*args, **named)


@contextmanager
def as_shapes(*, vectors: bool = False) -> Iterator[None]:
    """Build modules inside with their matrices on the meta device: no memory, no values.

    Vectors (norms, biases) and buffers are small, and what they hold is known to the model alone: they stay as it makes
    them. `parallelize` with a seed then makes each rank's part of the matrices, or a checkpoint fills them.

    Args:
        vectors: whether all parameters are shapes alone, as where files fill them; buffers keep their values.
    """
    least = 0 if vectors else 2

    def without_values(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        """The parameter to register in place of this one; None: this one."""
        del module, name
        if param is None or param.is_meta or param.ndim < least:
            return None
        return nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)

    handle = register_module_parameter_registration_hook(
        without_values  # pyright: ignore[reportArgumentType] - the stub says None; torch documents what this returns
    )
    try:
        with _WithoutDraws():
            yield
    finally:
        handle.remove()
