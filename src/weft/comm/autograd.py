"""Differentiable collectives along a dim, and the same collectives as torch operators for torch.compile.

Without operators, the compiler would trace a collective into its transport and fail there. `prepare_operators`
registers the operators of one axis. After that, the functions of this module call them while they are compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.collectives import all_gather, all_reduce, reduce_scatter
from weft.comm.mesh import Axis
from weft.comm.peer import all_to_all
from weft.errors import CommError
from weft.private_torch import Function, split

#: An operator: its schema, its implementation (takes the axis and the operator's arguments), and its fake kernel for
#: shapes.
Operator = tuple[str, Callable[..., Any], Callable[..., Any]]

#: Prefix of the torch namespaces of the axes' operators.
_SPACE = "weft_"
#: Schema of each function's operator, by name.
_SCHEMAS = {
    "add_up": "(Tensor x) -> Tensor",
    "largest": "(Tensor x) -> Tensor",
    "join": "(Tensor x, int dim) -> Tensor",
    "sum_part": "(Tensor x, int dim) -> Tensor",
}


def add_up(x: Tensor, axis: Axis) -> Tensor:
    """Return the sum of the ranks' tensors in a new tensor."""
    if (operator := _compiled(axis, "add_up")) is not None:
        return operator(x)
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def largest(x: Tensor, axis: Axis) -> Tensor:
    """Return the elementwise maximum of the ranks' tensors in a new tensor."""
    if (operator := _compiled(axis, "largest")) is not None:
        return operator(x)
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis, "max")


def join(x: Tensor, axis: Axis, dim: int) -> Tensor:
    if (operator := _compiled(axis, "join")) is not None:
        return operator(x, dim)
    if dim == 0:
        return all_gather(x.contiguous(), axis, out=x.new_empty((axis.size * x.shape[0], *x.shape[1:])))
    parts = all_gather(x.contiguous(), axis).view(axis.size, *x.shape)
    return torch.cat(parts.unbind(0), dim)


def sum_part(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Return this rank's slice along `dim` of the sum over the ranks.

    Raises CommError if the size of `dim` is not a multiple of the axis's size.
    """
    size = share(x, axis, dim)
    if (operator := _compiled(axis, "sum_part")) is not None:
        return operator(x, dim)
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    if dim == 0:
        return reduce_scatter(x.contiguous(), axis, out=x.new_empty(shape))
    stacked = torch.stack(split(x, size, dim))
    return reduce_scatter(stacked, axis, out=x.new_empty(shape))


def is_product(operator: Any) -> bool:
    """Return True if a graph's operator fuses a matmul with communication over some axis."""
    space, _, name = str(operator).partition(".")
    return space.startswith(_SPACE) and name in ("gather_multiply.default", "multiply_scatter.default")


def is_join(operator: Any) -> bool:
    """Return True if a graph's operator is `join` over some axis."""
    space, _, name = str(operator).partition(".")
    return space.startswith(_SPACE) and name == "join.default"


def share(x: Tensor, axis: Axis, dim: int) -> int:
    """Return the size of each rank's slice of `dim`.

    Raises CommError if the size of `dim` is not a multiple of the axis's size.
    """
    size, rest = divmod(x.shape[dim], axis.size)
    if rest:
        raise CommError(
            f"axis {axis.label}: dim {dim} of shape {tuple(x.shape)} is not a multiple of its {axis.size} ranks. "
            f"Pad it to {x.shape[dim] + axis.size - rest}."
        )
    return size


def prepare_operators(axis: Axis, others: Mapping[str, Operator] | None = None) -> None:
    """Make torch operators for the collectives over this axis, so that compiled graphs can contain them.

    Call it before compiling code that uses the axis. Operators that exist already are kept, and an axis of size 1 gets
    none. They are unregistered when the axis is freed. others: additional operators by name, for `operator_of`.
    """
    if axis.size > 1 and "add_up" not in axis.operators:
        functions: dict[str, Callable[..., Any]] = {
            "add_up": add_up, "largest": largest, "join": join, "sum_part": sum_part
        }  # fmt: skip
        shaped = {
            "add_up": torch.empty_like,
            "largest": torch.empty_like,
            "join": _scaled(axis.size, 1),
            "sum_part": _scaled(1, axis.size),
        }
        own = {name: (_SCHEMAS[name], _axis_second(functions[name]), shaped[name]) for name in _SCHEMAS}
        axis.operators.update(_Library(axis, own).operators())
    missing = {name: each for name, each in (others or {}).items() if name not in axis.operators}
    if axis.size > 1 and missing:
        axis.operators.update(_Library(axis, missing).operators())


def operator_of(axis: Axis, name: str) -> Callable[..., Any]:
    """Return an operator that was passed to `prepare_operators` in `others`."""
    return axis.operators[name]  # pyright: ignore[reportReturnType]  # kept as objects


class _Library:
    """Operators of one axis, in a torch namespace that is deleted with this object."""

    def __init__(self, axis: Axis, known: Mapping[str, Operator]):
        self.axis, self._known = axis, known
        self._space = f"{_SPACE}{id(self)}"
        self._library: Any = torch.library.Library(self._space, "DEF")  # its methods have no types

    def operators(self) -> dict[str, object]:
        """Create the operators. Return them by name, with this object, because torch does not keep it alive."""
        this: weakref.ref[_Library] = weakref.ref(self)
        library: Any = torch.library  # whose functions have no types
        for name, (schema, function, fake) in self._known.items():
            self._library.define(f"{name}{schema}")
            self._library.impl(name, _on_axis(function, this), "CompositeExplicitAutograd")
            library.register_fake(f"{self._space}::{name}", fake, lib=self._library)
        space = getattr(torch.ops, self._space)
        return {f"library {self._space}": self, **{name: getattr(space, name).default for name in self._known}}


def _on_axis(function: Callable[..., Any], known: weakref.ref[_Library]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        library = known()
        assert library is not None, "the mesh is gone, and so is what was compiled for it"
        return function(library.axis, *args)

    return call


def _axis_second(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(axis: Axis, x: Tensor, *others: Any) -> Tensor:
        return function(x, axis, *others)

    return call


def _scaled(times: int, over: int) -> Callable[[Tensor, int], Tensor]:
    def shaped(x: Tensor, dim: int) -> Tensor:
        return x.new_empty((*x.shape[:dim], x.shape[dim] * times // over, *x.shape[dim + 1 :]))

    return shaped


def _compiled(axis: Axis, name: str) -> Callable[..., Tensor] | None:
    """Return the axis's operator of that name while torch.compile traces, else None."""
    return axis.operators.get(name) if torch.compiler.is_compiling() else None  # pyright: ignore[reportReturnType]  # kept as objects


# Differentiable collectives over a given axis. Their backward is the transposed collective.


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the same tensor; backward sums its gradient over the axis.

    Use it when each rank of the axis continues with a part of the computation.
    """
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def sum_over(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum the ranks' tensors; in backward, every rank receives the gradient of the sum."""
    return x if axis.size == 1 else _SumOver.apply(x, axis)


def gather_from(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Join the ranks' tensors along `dim`; backward sums the gradients and returns this rank's slice.

    Use it when each rank continues with a part of the computation. x: has the same shape on all ranks.
    """
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim % x.dim())


def gather_slice(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Join the ranks' tensors along `dim`; backward returns this rank's slice of the gradient, without a sum.

    Use it when all ranks continue with the same computation. x: has the same shape on all ranks.
    """
    return x if axis.size == 1 else _GatherSlice.apply(x, axis, dim % x.dim())


def scatter_sum(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice along `dim` of the sum of the ranks' tensors; backward joins the ranks' gradients.

    x: has the same shape on all ranks. Raises CommError if the size of `dim` is not a multiple of the axis's size.
    """
    return x if axis.size == 1 else _ScatterSum.apply(x, axis, dim % x.dim())


def slice_to(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice along `dim` of a tensor that is equal on all ranks; backward joins the ranks' gradients.

    Raises CommError if the size of `dim` is not a multiple of the axis's size.
    """
    return x if axis.size == 1 else _SliceTo.apply(x, axis, dim % x.dim())


def exchange(
    x: torch.Tensor, axis: Axis, send: Sequence[int], receive: Sequence[int], most: int | None = None
) -> torch.Tensor:
    """Exchange `send` and `receive` rows with each rank; backward exchanges the gradients in reverse.

    Args:
        x: (sum of `send`, ...), the rows for each rank in order.
        send, receive: number of rows to each rank and from each rank, in order of the axis.
        most: maximum number of rows that any rank sends to another. If None, the ranks exchange it first.
    """
    return x if axis.size == 1 else _Exchange.apply(x, axis, tuple(send), tuple(receive), most)


def exchange_dims(x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
    """Return each rank's slice of `split_dim` from all ranks, joined along `join_dim` in order of the axis.

    With heads as split_dim and sequence as join_dim, this is the exchange of Ulysses (Jacobs et al. 2023, arXiv
    2309.14509). x: has the same shape on all ranks. Raises CommError if the size of `split_dim` is not a multiple of
    the axis's size.
    """
    return x if axis.size == 1 else _ExchangeDims.apply(x, axis, split_dim % x.dim(), join_dim % x.dim())


def max_over(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the elementwise maximum of the ranks' tensors, without a gradient."""
    return x.detach() if axis.size == 1 else largest(x.detach(), axis)


def _part(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    return x.narrow(dim, axis.rank * (size := share(x, axis, dim)), size)


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return add_up(grads[0], ctx.axis), None


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return add_up(x, axis)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return join(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return sum_part(grads[0], ctx.axis, ctx.dim), None, None


class _GatherSlice(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return join(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _part(grads[0], ctx.axis, ctx.dim), None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return sum_part(x, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return join(grads[0], ctx.axis, ctx.dim), None, None


class _SliceTo(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _part(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return join(grads[0], ctx.axis, ctx.dim), None, None


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: Axis, send: tuple[int, ...], receive: tuple[int, ...], most: int | None
    ) -> torch.Tensor:
        ctx.axis, ctx.send, ctx.receive, ctx.most = axis, send, receive, most
        return all_to_all(x, axis, send=send, receive=receive, most=most)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        back = all_to_all(grads[0], ctx.axis, send=ctx.receive, receive=ctx.send, most=ctx.most)
        return back, None, None, None, None


class _ExchangeDims(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
        ctx.axis, ctx.dims = axis, (split_dim, join_dim)
        return _swap(x, axis, split_dim, join_dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        split_dim, join_dim = ctx.dims
        return _swap(grads[0], ctx.axis, join_dim, split_dim), None, None, None


def _swap(x: torch.Tensor, axis: Axis, split_dim: int, join_dim: int) -> torch.Tensor:
    parts = torch.stack(split(x, share(x, axis, split_dim), split_dim))
    return torch.cat(all_to_all(parts, axis).unbind(0), join_dim)
