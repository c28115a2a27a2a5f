"""Torch modes that pass the operations of one forward, and its uses of tensor sizes, to a `TokenTrace`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weft.models.inspect.counted_sizes import CONSTANTS, RESHAPES, Counted, counted_in, counted_result, fits_parts
from weft.models.inspect.private_torch import CustomBackward
from weft.models.inspect.token_rules import TokenDim
from weft.private_torch import TorchDispatchMode, tree_leaves

#: Attributes that Python code may read from tokens, because they do not depend on values.
_ASKED = frozenset((
    "dim", "ndim", "ndimension", "dtype", "device", "requires_grad", "is_floating_point", "is_complex", "is_contiguous",
    "is_cuda", "is_meta", "is_cpu", "layout", "is_leaf", "grad_fn", "element_size", "itemsize", "get_device", "type",
    "__repr__", "__format__", "__hash__", "grad", "is_sparse", "is_nested", "is_quantized", "names", "is_tensor",
    "_version", "is_mkldnn", "retains_grad", "__set__", "requires_grad_", "data_ptr", "is_inference", "stride",
    "__setitem__", "register_hook", "retain_grad",
))  # fmt: skip
_SIZES = frozenset(("shape", "size", "numel", "nelement"))
#: Functions that read shapes and draw random numbers internally, but treat each token separately.
_DROPOUT = frozenset(("dropout", "alpha_dropout", "dropout1d"))


class TokenOperations(TorchFunctionMode):
    """Mode that records the name of the current torch function, and checks how code uses the number of tokens."""

    def __init__(self, flow: Any):
        super().__init__()
        # The `TokenTrace` to which this mode reports. Naming its type would be an import cycle.
        self.flow, self.name, self.pauses, self.is_over = flow, "", 0, False
        self.weight_shapes: set[torch.Size] = set()  # of weights whose gradient a traced backward computes
        self._followed: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self.pauses:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = getattr(func.__self__, "__name__", name)
        if name in ("__contains__", "__bool__") and args[0].is_meta:
            if self.flow.marks.of(args[0]) is not None:
                self.flow.record_mixing(name.strip("_"))
            return False  # "is there padding in these ids?" has no answer without numbers
        self.name = name.strip("_") if name.startswith("_") else name
        for leaf in tree_leaves((args, kwargs)):
            self.follow(leaf)
        if name == "register_hook" and (mark := self.flow.marks.of(args[0])) is not None:
            grad = torch.zeros_like(args[0].detach())
            self._trace_backward(lambda: args[1](grad), [grad], args[0].shape, mark, "a hook of its gradient")
        if name in _DROPOUT and args and self.flow.marks.of(args[0]) is not None:
            return self._dropped(func, args, kwargs)
        result = func(*args, **kwargs)
        return result if self.is_over else self._look(name, args, kwargs, result)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Pause the trace inside the context."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    def follow(self, value: Any) -> None:
        """Trace the backward of the custom function that created a tensor with tokens."""
        mark = self.flow.marks.of(value)
        if mark is None or id(value) in self._followed:
            return
        self._followed.add(id(value))
        backward = CustomBackward.of(value)
        if backward is not None:
            leaves = [node for node, _ in backward.next_functions if type(node).__name__ == "AccumulateGrad"]
            self.weight_shapes = {node.variable.shape for node in leaves}
            given = [each for each in (*backward.grads, *backward.saved_tensors) if each is not None]
            self._trace_backward(backward, given, value.shape, mark, f"the backward of {backward.name}")
            self.weight_shapes = set()

    def _trace_backward(
        self, call: Any, given: list[torch.Tensor], shape: torch.Size, mark: TokenDim, what: str
    ) -> None:
        """Run a backward on tensors. Those with the first dims of `shape` get its mark."""
        self.flow.note(given)
        for one in given:
            if self.flow.marks.of(one) is None and one.shape[: mark.dim + 1] == shape[: mark.dim + 1]:
                self.flow.marks.put(one, mark)
            self._followed.add(id(one))
        pauses, self.pauses = self.pauses, 0
        try:
            with nullcontext() if pauses else self:  # hooks run with the mode on, functions without
                call()
        except Exception:  # user code may need values
            self.flow.record_mixing(what)
        self.pauses = pauses

    def _dropped(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self.paused():
            result = func(*args, **kwargs)
        mark = self.flow.marks.of(args[0])
        assert mark is not None
        self.flow.marks.put(result, mark)
        self.flow.note([result])
        return result

    def _misuse(self, what: str) -> None:
        if not self.is_over:
            self.flow.misuse(what)

    def _look(self, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        """Check a function's size queries and its use of sizes, and return its result."""
        flow = self.flow
        first = args[0] if args else None
        mark = flow.marks.of(first)
        if mark is not None:
            assert isinstance(first, torch.Tensor)
            dim = int(mark.dim)
            size = first.shape[dim]
            if name in _SIZES and size > mark.inner:
                return counted_result(name, args, kwargs, result, dim, size // mark.ranks, self._misuse)
            if name == "__len__" and mark.dim == 0:
                self._misuse("reads {} by len()")
            elif name in RESHAPES and isinstance(result, torch.Tensor):
                self._check_reshape(name, args, kwargs, mark, result)
            elif name not in _ASKED and not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
                flow.record_mixing(self.name)
        if next(counted_in((args, kwargs)), None) is not None:
            self._check_sizes(name, args, kwargs, result, is_marked=mark is not None)
        return result

    def _check_reshape(self, name: str, args: Any, kwargs: Any, mark: TokenDim, result: torch.Tensor) -> None:
        if (new := self.flow.marks.of(result)) is None:
            return
        shape, made = [*args[0].shape], [*result.shape]
        shape[mark.dim] //= mark.ranks
        made[new.dim] //= mark.ranks
        if not fits_parts(name, args, kwargs, shape, made):
            self._misuse(f"writes {{}} down in `{name}`")

    def _check_sizes(self, name: str, args: Any, kwargs: Any, result: Any, is_marked: bool) -> None:
        """Check the use of the number of tokens among the arguments of a function. Mark constants of that size."""
        if (is_marked and name in RESHAPES) or name in ("expand", "broadcast_to"):
            return
        dims: list[int] = []
        if name in (*CONSTANTS, "repeat") and isinstance(result, torch.Tensor):
            flat = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, int)]
            dims = [dim for dim, size in enumerate(flat) if isinstance(size, Counted) and dim < result.dim()]
        if len(dims) == len(list(counted_in((args, kwargs)))) == 1 and (name in CONSTANTS or not is_marked):
            self.flow.marks.put(result, TokenDim(dims[0], result.shape[dims[0]]))
        else:
            self._misuse(f"uses {{}} in `{self.name}`")


class TokenWatch(TorchDispatchMode):
    """Mode that passes each aten operation to the trace, with the name of the torch function that calls it."""

    def __init__(self, operations: TokenOperations):
        super().__init__()  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
        self._operations = operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._operations.pauses:
            outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            name = self._operations.name or str(func.overloadpacket).rpartition(".")[2]
            self._operations.flow.step(name, func, args, kwargs, outputs)
        return result
