"""Python code that a compiled graph calls as one custom operator, without tracing it.

torch.compile breaks a graph if the host must read values, for example which expert each row uses, or which part of a
sequence a rank attends to. A recomputed block with a graph break is not compiled at all. As an operator, the code is
one node of the graph. Its forward records a separate autograd graph, which the operator's backward traverses.

The recorded graph lives as long as the memory of the operator's second result. A compiled graph that recomputes the
operator in backward drops the first result immediately, so recompute still saves that memory.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from weft.memory.private_torch import above_autograd

#: Code of an operator: (owner, tensors, numbers) -> one new tensor.
_Code = Callable[[Any, Sequence[Tensor], Sequence[float]], Tensor]

_FORWARD = (
    "(Tensor code, Tensor[] inputs, float[] numbers, SymInt[] shape, ScalarType dtype, bool[] needs)"
    " -> (Tensor, Tensor)"
)
_BACKWARD = "(Tensor record, Tensor grad, Tensor[] inputs) -> Tensor[]"
_GONE = "the model is gone, and so is what was compiled for it"


class _Record(np.ndarray[Any, Any]):
    """NumPy array behind a one-element tensor. It keeps the autograd graph of a forward as long as the tensor lives."""

    inputs: list[Tensor]
    output: Tensor


class Opaque:
    """The operators of one model, in a torch namespace that is removed with this object.

    `is_attention` marks the operator for recompute policies that save or recompute attention. `recomputes` is True if
    blocks are checkpointed. torch's checkpoint counts saved tensors and would find fewer in a recomputation that reused
    the result, so the operator then hides its tensors from saved-tensor hooks. Otherwise, the hooks for activation
    offload receive them.
    """

    #: Torch keeps parts of a removed namespace, so names are never reused. Names are counted and not random, because
    #: caches of compiled code contain operator names.
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, *, is_attention: bool = False, recomputes: bool = False) -> None:
        self.recomputes = recomputes
        self._codes: list[tuple[_Code, weakref.ref[Any]]] = []
        self._records: weakref.WeakValueDictionary[int, _Record] = weakref.WeakValueDictionary()
        self._num_records = 0
        self._space = f"weft_{next(self._numbers)}"
        self._library: Any = torch.library.Library(self._space, "DEF")  # its methods are untyped
        name = "scaled_dot_product_attention" if is_attention else "forward"
        self._define(name, _FORWARD, _forward, _forward_shapes)
        self._define("backward", _BACKWARD, _backward, _backward_shapes)
        library: Any = torch.library
        library.register_autograd(
            f"{self._space}::{name}", _autograd(weakref.ref(self)), setup_context=_keep, lib=self._library
        )
        operators = getattr(torch.ops, self._space)
        self.forward: Callable[..., tuple[Tensor, Tensor]] = getattr(operators, name).default
        shown: Any = self.forward
        shown.is_attention = is_attention
        self.backward: Callable[..., list[Tensor]] = operators.backward.default

    def _define(self, name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
        known = weakref.ref(self)

        def call(*args: Any) -> Any:
            opaque = known()
            assert opaque is not None, _GONE
            return run(opaque, *args)

        library: Any = torch.library
        self._library.define(f"{name}{schema}")
        self._library.impl(name, call, "CompositeExplicitAutograd")
        library.register_fake(f"{self._space}::{name}", shapes, lib=self._library)

    def handle(self, code: _Code, owner: object) -> Handle:
        """Return a handle that `owner` calls while it is compiled.

        `code` is called with the owner, to which only a weak reference is stored, and its inputs. It must not read
        other tensors that need a gradient.
        """
        self._codes.append((code, weakref.ref(owner)))
        return Handle(self, torch.tensor(len(self._codes) - 1))

    def run(self, number: Tensor, inputs: Sequence[Tensor], numbers: Sequence[float]) -> Tensor:
        """Run the code that is registered under a number.

        Args:
            number: 0-d tensor, the number of the `Handle`.
            inputs: tensors for the code.
            numbers: Python numbers for the code.
        """
        code, known = self._codes[int(number)]
        owner = known()
        assert owner is not None, _GONE
        return code(owner, inputs, numbers)

    def keep(self, inputs: list[Tensor], output: Tensor) -> Tensor:
        """Return a tensor that keeps the autograd graph of a forward alive as long as the tensor's memory lives."""
        self._num_records += 1
        record = np.array([self._num_records]).view(_Record)
        record.inputs, record.output = inputs, output
        self._records[self._num_records] = record
        library: Any = torch  # from_numpy is untyped
        return library.from_numpy(record)

    def record_of(self, number: Tensor) -> _Record:
        """Return the autograd graph of a forward from the tensor that `keep` returned."""
        return self._records[int(number)]

    @property
    def num_records(self) -> int:
        """Number of forwards whose backward may still run."""
        return len(self._records)


class Handle:
    """Callable that runs one module's code as an operator.

    A compiled graph gets the code's number as a tensor, so that all blocks of one class share a graph. The handle in a
    copied module is closed, because it would run the code of the original.
    """

    def __init__(self, opaque: Opaque | None = None, number: Tensor | None = None):
        self._opaque, self._number = opaque, number

    def __deepcopy__(self, memo: dict[int, Any]) -> Handle:
        return Handle()

    def __reduce__(self) -> tuple[type[Handle], tuple[()]]:
        return Handle, ()

    @property
    def is_open(self) -> bool:
        """True if the handle can be called."""
        return self._opaque is not None

    def __call__(
        self, shape: Sequence[int], dtype: torch.dtype, inputs: Sequence[Tensor], numbers: Sequence[float] = ()
    ) -> Tensor:
        """Run the code as one operator. The output has the given shape and dtype, and the device of the first input."""
        assert self._opaque is not None
        assert self._number is not None
        records = torch.is_grad_enabled()
        needs = [records and x.requires_grad for x in inputs]
        return self._opaque.forward(self._number, inputs, numbers, shape, dtype, needs)[0]


def _forward(
    opaque: Opaque,
    number: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[float],
    shape: Sequence[int],
    dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    hooks = saved_tensors_hooks(Tensor.detach, _same) if opaque.recomputes else nullcontext()
    with above_autograd(), torch.set_grad_enabled(any(needs)), hooks:
        own = [x.detach().requires_grad_() if need else x for x, need in zip(inputs, needs, strict=True)]
        output = opaque.run(number, own, numbers)
    if output.shape != tuple(shape) or output.dtype != dtype:
        found = f"{tuple(output.shape)} of {output.dtype}"
        raise RuntimeError(f"an operator of a graph gave {found}, not {tuple(shape)} of {dtype}")
    record = opaque.keep(own, output) if output.requires_grad else torch.zeros(1, dtype=torch.int64)
    return output.detach().contiguous(), record


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _forward_shapes(
    number: Tensor,
    inputs: Sequence[Tensor],
    numbers: Sequence[float],
    shape: Sequence[int],
    dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    return inputs[0].new_empty(shape, dtype=dtype), number.new_empty(1)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], *inputs[1])
    ctx.has_numbers, ctx.needs = len(inputs[2]) > 0, inputs[5]
    ctx.mark_non_differentiable(output[1])


def _autograd(known: weakref.ref[Opaque]) -> Callable[..., Any]:
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        opaque = known()
        assert opaque is not None, _GONE
        record, *inputs = ctx.saved_tensors
        found = iter(opaque.backward(record, grad, [x for x, need in zip(inputs, ctx.needs, strict=True) if need]))
        no_numbers: list[None] | None = None if ctx.has_numbers else []  # torch treats an empty list as a tensor list
        return None, [next(found) if need else None for need in ctx.needs], no_numbers, None, None, None

    return backward


def _backward(opaque: Opaque, number: Tensor, grad: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    del inputs  # only their shapes matter, for the fake kernel
    record = opaque.record_of(number)
    wanted = [x for x in record.inputs if x.requires_grad]
    with above_autograd():
        found: Sequence[Any] = torch.autograd.grad(record.output, wanted, grad, allow_unused=True)
    return [torch.zeros_like(x) if one is None else one.contiguous() for x, one in zip(wanted, found, strict=True)]


def _backward_shapes(record: Tensor, grad: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
