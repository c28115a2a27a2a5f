"""Follow the output features of linear layers through a forward, and find operations that mix them.

Marks on tensors record the layers and the dim of their features. An operation that treats every feature (or head)
separately copies the mark to its result. An operation that mixes features or is unknown removes the mark, and that
layer cannot be sharded by columns. A linear layer with a marked input can be sharded by rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch.overrides import TorchFunctionMode

from weft.models.inspect.counted_sizes import (
    CONSTANTS,
    RESHAPES,
    Counted,
    counted_in,
    counted_result,
    fits_parts,
    parts_of_index,
    sizes_of,
    track_reshape,
)
from weft.models.inspect.layers import WrittenHeads, made_from
from weft.models.inspect.private_torch import CustomBackward
from weft.private_torch import tree_leaves

#: Each value of the result depends on the values at the same position only.
_POINTWISE = frozenset((
    "add", "sub", "mul", "div", "true_divide", "rsub", "neg", "pow", "sqrt", "rsqrt", "exp", "log", "tanh",
    "sigmoid", "relu", "relu6", "silu", "gelu", "elu", "selu", "mish", "erf", "abs", "square", "cos", "sin",
    "softplus", "leaky_relu", "hardswish", "hardtanh", "dropout", "where", "masked_fill", "clamp", "to", "float",
    "double", "half", "bfloat16", "type", "type_as", "contiguous", "clone", "detach", "addcmul", "maximum",
    "minimum", "nan_to_num", "gt", "lt", "ge", "le", "eq", "ne", "sign", "sgn", "floor", "ceil", "round", "trunc",
    "frac",
    "reciprocal", "log1p", "expm1", "exp2", "log2", "log10", "atan", "tan", "sinh", "cosh", "asinh", "erfc",
    "logical_and", "logical_or", "logsigmoid", "hardsigmoid", "softsign", "celu", "clip", "clamp_min", "clamp_max",
    "isnan", "isfinite", "positive", "absolute", "multiply", "divide", "subtract", "negative", "float_power",
    "remainder", "logical_not", "_to_copy", "alias",
))  # fmt: skip
_SIZES = frozenset(("shape", "size", "numel", "nelement"))
#: Attributes that Python code may read from features, because they do not depend on values.
_ASKED = frozenset((
    "dim", "ndim", "ndimension", "dtype", "device", "requires_grad", "is_floating_point", "is_complex", "is_contiguous",
    "is_cuda", "is_meta", "is_cpu", "layout", "is_leaf", "grad_fn", "element_size", "get_device", "type", "__len__",
    "__repr__", "__format__", "__hash__", "grad", "is_sparse", "is_nested", "is_quantized", "is_tensor", "shape",
    "size",
    "numel", "nelement", "_version", "is_mkldnn", "data_ptr", "is_inference", "__setitem__", "stride", "requires_grad_",
    "backward_hooks", "_backward_hooks", "register_hook", "retain_grad",
))  # fmt: skip
_SUMS = frozenset(("mean", "sum", "var", "amax", "amin", "norm"))
#: Operations whose result has a shape of the arguments but none of the input's values.
_FRESH = frozenset(("new_empty", "new_zeros", "new_ones", "new_full"))
_ALIKE = frozenset(("empty_like", "zeros_like", "ones_like", "full_like"))


@dataclass(frozen=True, slots=True)
class Mark:
    """The dim of a tensor that has output features of linear layers, and these layers.

    Attributes:
        sources: paths of the layers.
        dim, count: the dim of the features, and the number of heads or features in it.
        segment: first feature and number of features, for a part of a fused layer's output.
    """

    sources: frozenset[str]
    dim: int
    count: int
    segment: tuple[int, int] | None = None


class FeatureFlow(TorchFunctionMode):
    """Marks of all tensors of one forward. `inside` is True in a layer whose own operations are ignored.

    Attributes:
        trusted: above zero while constant head counts and widths in modules are replaced by one rank's.
        own: ids of the parameters of each of these modules, the innermost last.
        weights: ids of parameters that a layer may shard.
        read: ids of parameters that are used outside their layer, and the operation.
        lookup: id of the weight of the embedding that is running.
        broken: reason why a layer cannot be sharded, by path.
        alone: paths of layers in `broken` whose features mixed only with each other.
    """

    def __init__(self, is_trusted: bool = False) -> None:
        super().__init__()
        self.trusted = int(is_trusted)
        self.own: list[frozenset[int]] = []
        self.is_over = False
        self.written: list[WrittenHeads | None] = []  # heads of the running modules around layers
        self.params: set[int] = set()
        self.met: dict[int, frozenset[str]] = {}  # features that were combined with parameters
        self.inside = False
        self.weights: set[int] = set()
        self.read: dict[int, str] = {}
        self.lookup: int | None = None
        self.broken: dict[str, str] = {}
        self.alone: set[str] = set()
        self.segments: dict[str, set[tuple[int, int]]] = {}
        self.rank_group: list[frozenset[str]] = []
        self.counts: dict[str, int] = {}
        self._marks: dict[int, tuple[torch.Tensor, Mark]] = {}  # keeps tensors alive so that ids stay unique
        self._traced: set[int] = set()  # marked tensors whose custom backward was traced
        self._fresh: dict[int, tuple[torch.Tensor, set[int]]] = {}  # uninitialized tensors, and their unmarked dims
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}  # views of fresh tensors, and their indices

    def mark(self, tensor: torch.Tensor, mark: Mark) -> None:
        """Record the mark of a tensor."""
        self._marks[id(tensor)] = (tensor, mark)
        for source in mark.sources:
            self.counts[source] = math.gcd(self.counts.get(source, 0), mark.count)
            if mark.segment is not None:
                self.segments.setdefault(source, set()).add(mark.segment)

    def of(self, value: Any) -> Mark | None:
        """Return a value's mark, or None if unmarked or its layers are all in `alone`. Trace a custom backward."""
        found = self._marks.get(id(value)) if isinstance(value, torch.Tensor) else None
        if found and not self.inside and id(value) not in self._traced:
            self.inside = True
            backward = CustomBackward.of(value)
            self.inside = False
            if backward is not None:
                given = [*backward.grads, *backward.saved_tensors, value]
                self._trace_backward(backward, given, *found, f"the backward of {backward.name}")
        return found[1] if found is not None and not found[1].sources <= self.alone else None

    def is_param(self, tensor: torch.Tensor) -> bool:
        """Return True for a parameter of a module that processes features. Its gradient is then a sum over ranks."""
        return id(tensor) in self.params

    def is_own(self, tensor: torch.Tensor) -> bool:
        """Return True if a module with one rank's head counts made a tensor from its parameters alone.

        The gradients of such parameters are summed over ranks. Those of parameters outside the module are not.
        """
        if not self.trusted:
            return False
        if not self.own:
            return True
        return made_from(tensor, self.own[-1])

    def end(self, mark: Mark, reason: str, alone: bool = True) -> None:
        """Record that the layers of a mark cannot be sharded. alone: their features mixed only with each other."""
        for source in mark.sources:
            self.broken.setdefault(source, reason)
        if alone and len(mark.sources) == 1:
            self.alone |= mark.sources

    def _trace_backward(self, call: Any, given: list[Any], like: torch.Tensor, mark: Mark, what: str) -> None:
        """Run a custom backward on tensors; those with the shape of `like` get its mark."""
        own = copy.copy(self)  # shares the recorded data
        self.inside = True
        for one in given:
            if isinstance(one, torch.Tensor) and one.shape == like.shape and id(one) not in self._marks:
                self.mark(one, mark)
        self._traced |= set(map(id, given))
        try:
            with own:
                call()
        except Exception:  # user code may need values
            self.end(mark, f"{what} cannot be traced")
        self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("__contains__", "__bool__") and args[0].is_meta:
            return False  # questions such as "is there padding in these ids?" have no answer without values
        result = func(*args, **kwargs)
        if self.inside:
            return result
        if self._fills(getattr(func, "__name__", ""), args, result):
            return result
        name = getattr(func, "__name__", "")
        name = getattr(func.__self__, "__name__", name) if name == "__get__" else name
        self._note_reads(name, args, kwargs)
        marked = [leaf for leaf in tree_leaves((args, kwargs)) if self.of(leaf) is not None]
        first = self.of(args[0]) if args else None
        if first is not None and name in _SIZES and not self.trusted:
            return self._counted(name, args, kwargs, result, first)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if first is not None and name == "register_hook":
            grad = torch.zeros_like(args[0].detach())
            self._trace_backward(lambda: args[1](grad), [grad], args[0], first, "a hook of its gradient")
        elif marked and outputs:
            self._pass_on(func, args, kwargs, marked, outputs)
        elif marked and not outputs and not self.trusted and name not in _ASKED:
            for leaf in marked:
                if (mark := self.of(leaf)) is not None:
                    self.end(mark, f"its features are read in Python by `{name}`")
        if not self.trusted:
            self._check_sizes(name, args, kwargs, result, first)
        return result

    def _note_reads(self, name: str, args: Any, kwargs: Any) -> None:
        """Record weights that an operation outside their layers reads, because a shard would not suffice there."""
        if name in _ASKED or name in _FRESH:
            return
        used = args[:1] if name in ("to", "type_as") else (args, kwargs)  # else only its dtype is read
        for leaf in tree_leaves(used):
            if id(leaf) in self.weights and not (name == "embedding" and id(leaf) == self.lookup):
                self.read.setdefault(id(leaf), name)

    def _counted(self, name: str, args: Any, kwargs: Any, result: Any, mark: Mark) -> Any:
        """Return the result of a size query, with a `Counted` that ends the mark on misuse."""

        def misuse(what: str) -> None:
            if not self.is_over:
                self.end(mark, f"code {what.format('their number')}")

        size = int(args[0].shape[mark.dim])
        return counted_result(name, args, kwargs, result, mark.dim, size // ranks_of(mark), misuse)

    def _check_sizes(self, name: str, args: Any, kwargs: Any, result: Any, before: Mark | None) -> None:
        """Remove marks if a rank's part is reshaped by sizes of the full tensor, or if sizes are used otherwise."""
        after = self.of(result)
        if name in RESHAPES and before is not None and after is not None:
            shape, made, ranks = [*args[0].shape], [*result.shape], ranks_of(before)
            shape[before.dim] //= ranks
            if made[after.dim] % ranks:
                self.end(after, f"shards of them are not shards after `{name}`")
                return
            made[after.dim] //= ranks
            if not fits_parts(name, args, kwargs, shape, made) and not self._is_written(
                name, args, shape, made, before
            ):
                self.end(after, f"their number, or the number of heads, is hard-coded in `{name}`; use -1 instead")
        elif name == "__len__" and before is not None and before.dim == 0:
            self.end(before, "code reads their number by len()")
        elif name not in (*RESHAPES, "__getitem__", "split", "chunk", "narrow"):
            for one in counted_in((args, kwargs)):
                if name not in CONSTANTS or one in tree_leaves((args[1:], kwargs.get("fill_value"))):
                    one.misuse(f"uses {{}} in `{name}`")

    def _is_written(self, name: str, args: Any, shape: list[int], made: list[int], mark: Mark) -> bool:
        """Return True if a reshape fits a rank's part when the code's head count is replaced by one rank's."""
        written, sizes = self.written[-1] if self.written else None, sizes_of(name, args, {})
        if written is None or sizes is None or name not in ("view", "reshape"):
            return False
        parts = [each.part if isinstance(each, Counted) else int(each) for each in sizes]
        found = written.local_sizes(parts, shape, ranks_of(mark))
        return found is not None and fits_parts(name, (args[0], *found), {}, shape, made)

    def _pass_on(self, func: Any, args: Any, kwargs: Any, marked: list[Any], outputs: list[torch.Tensor]) -> None:
        marks = [mark for leaf in marked if (mark := self.of(leaf)) is not None]
        step = FlowStep(self, plain_name(func), args, kwargs, marks, outputs)
        if step.name in _FRESH:
            self._fresh |= {id(output): (output, set(range(output.dim()))) for output in outputs}
            return
        made = list(step.marks(marked))
        alone = len({mark.sources for mark in marks}) == 1
        if not alone:
            self.rank_group.append(frozenset[str]().union(*(mark.sources for mark in marks)))
        if not made:
            for mark in marks:
                self.end(mark, step.reason or f"its features are combined in `{step.name}`", alone)
        for tensor, mark in made:
            self.mark(tensor, mark)

    def _fills(self, name: str, args: Any, result: Any) -> bool:
        """Follow a write into part of a tensor, or a view of an uninitialized tensor. Return False for other calls."""
        if name == "__getitem__" and id(args[0]) in self._fresh:
            self._views[id(result)] = (result, args[0], args[1])
        elif name == "__setitem__":
            self._fill(*args)
        elif name == "copy_" and id(args[0]) in self._views:
            self._fill(*self._views[id(args[0])][1:], args[1])
        else:
            return False
        return True

    def _fill(self, target: torch.Tensor, index: Any, value: Any) -> None:
        """Follow a write into part of `target`, which gets the value's mark if features keep their positions."""
        mark, known = self.of(value), self.of(target)
        if mark is None:
            if known is not None and not (
                uniform(value, known.dim - target.dim()) and self._is_all(index, target, known)
            ):
                self.end(known, "some of its features are replaced, or by different numbers")
            elif (fresh := self._fresh.get(id(target))) is not None:
                fresh[1].intersection_update([dim for dim in fresh[1] if uniform(value, dim - target.dim())])
            return
        parts: list[Any] = [*index] if isinstance(index, tuple) else [index]
        plain = all(part is Ellipsis or _is_slice(part) for part in parts) and value.dim() == target.dim()
        whole = plain and value.shape[mark.dim] == target.shape[mark.dim]
        fresh = self._fresh.get(id(target))
        if whole and known is None and fresh is not None and mark.dim in fresh[1]:
            self.mark(target, replace(mark, segment=None))
        elif whole and known is not None and known.dim == mark.dim:
            self.rank_group.append(mark.sources | known.sources)
            self.mark(target, replace(known, sources=mark.sources | known.sources, segment=None))
        else:
            for each in (mark, known):
                if each is not None:
                    self.end(each, "its features are written into a tensor", known is None)

    def _is_all(self, index: Any, target: torch.Tensor, known: Mark) -> bool:
        """Return True if an index selects all features of a tensor, or each feature by its own values."""
        if (mask := self.of(index)) is not None:
            return mask.dim == known.dim and index.shape == target.shape
        parts = [part for part in parts_of_index(index, target.dim()) or () if part is not None]
        return bool(parts) and parts[known.dim] == slice(None)


def ranks_of(mark: Mark) -> int:
    """Return the smallest number of ranks above one that can share the heads or features of a mark equally."""
    return next((each for each in range(2, mark.count) if mark.count % each == 0), max(mark.count, 1))


def uniform(value: Any, dim: int) -> bool:
    """Return True if a value is constant along `dim` (counted from the end), so that any part of it is equal."""
    if not isinstance(value, torch.Tensor) or -dim > value.dim():
        return True
    return value.shape[dim] == 1 or value.stride()[dim] == 0


def plain_name(func: Any) -> str:
    """Return an operation's name, the same for its in-place, reflected, method and attribute forms."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        name = getattr(func.__self__, "__name__", name)  # an attribute: `x.mT`
    name = name.strip("_")
    return name[1:] if name[:1] in "ri" and name[1:] in _POINTWISE else name


class FlowStep:
    """One operation on tensors with marks."""

    def __init__(
        self, flow: FeatureFlow, name: str, args: Any, kwargs: Any, marks: list[Mark], outputs: list[torch.Tensor]
    ):
        self.flow, self.name, self.args, self.kwargs, self.outputs = flow, name, args, kwargs, outputs
        sources = frozenset[str]().union(*(mark.sources for mark in marks))
        segment = marks[0].segment if len(marks) == 1 else None
        self.first = replace(marks[0], sources=sources, segment=segment)
        self.all = marks
        self.reason = ""

    def marks(self, marked: list[Any]) -> Iterator[tuple[torch.Tensor, Mark]]:
        """Yield each marked output with its mark. Yield nothing if features mix."""
        if self.name in _POINTWISE:
            yield from self._pointwise(marked)
            return
        if self.name in _ALIKE:
            yield from self._keep(self.first.dim)
            return
        if self.name in ("min", "max") and isinstance(self._argument(1, "other"), torch.Tensor):
            yield from self._pointwise(marked)
            return
        rule = getattr(self, f"_{self.name}", None)
        if self.name in _SUMS:
            rule = self._reduce
        if rule is not None:
            yield from rule()

    def _argument(self, place: int, name: str, default: Any = None) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def _is_part(self, size: Any) -> bool:
        """Return True if a rank uses its own number of features instead of `size`."""
        written = self.flow.written[-1] if self.flow.written else None
        return (
            self.flow.trusted > 0
            or (isinstance(size, Counted) and size.part * ranks_of(self.first) == int.__add__(size, 0))
            or (written is not None and size in written.totals and self.name == "split")
        )

    def _keep(self, dim: int | None, count: int | None = None) -> Iterator[tuple[torch.Tensor, Mark]]:
        if dim is not None:
            for output in self.outputs:
                size = output.shape[dim] if count is None else count
                yield output, replace(self.first, dim=dim, count=size)

    def _pointwise(self, marked: list[Any]) -> Iterator[tuple[torch.Tensor, Mark]]:
        [output] = self.outputs
        for leaf in tree_leaves((self.args, self.kwargs)):
            if not isinstance(leaf, torch.Tensor):
                continue
            mark, shift = self.flow.of(leaf), output.dim() - leaf.dim()
            if mark is not None and mark.dim + shift != self.first.dim + output.dim() - marked[0].dim():
                return
            if mark is not None and leaf.shape[mark.dim] != output.shape[mark.dim + shift]:
                self.reason = f"a single feature is combined with all others in `{self.name}`"
                return
            if mark is None and leaf.requires_grad and not self.flow.is_own(leaf):
                self.flow.met[id(leaf)] = self.flow.met.get(id(leaf), frozenset()) | self.first.sources
                if not self.flow.is_param(leaf):
                    self.reason = f"its features meet a tensor with a gradient in `{self.name}` that no cut layer made"
                    return
            place = self.first.dim + output.dim() - marked[0].dim() - shift
            if mark is None and place >= 0 and not uniform(leaf, place - leaf.dim()):
                self.reason = f"its features meet a tensor in `{self.name}` that no cut layer made"
                return
        yield from self._keep(self.first.dim + output.dim() - marked[0].dim())

    def _reduce(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        dims = self._argument(1, "dim")
        rank = self.args[0].dim()
        if dims is None:
            return
        dims = {dim % rank for dim in ([dims] if isinstance(dims, int) else dims)}
        if self.first.dim not in dims:
            lost = 0 if self._argument(2, "keepdim", False) else sum(dim < self.first.dim for dim in dims)
            yield from self._keep(self.first.dim - lost)

    def _max(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if isinstance(self._argument(1, "dim"), int):
            yield from self._reduce()

    _min = _logsumexp = _max

    def _softmax(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if self._argument(1, "dim", -1) % self.args[0].dim() != self.first.dim:
            yield from self._keep(self.first.dim)

    _log_softmax = _sort = _argsort = _softmax

    def _cumsum(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        dims = self._argument(2, "dims") if self.name == "roll" else self._argument(1, "dim", self.kwargs.get("dims"))
        if dims is not None:
            used = {dim % self.args[0].dim() for dim in ([dims] if isinstance(dims, int) else dims)}
            if self.first.dim not in used:
                yield from self._keep(self.first.dim)

    _cumprod = _flip = _roll = _cumsum

    def _pad(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        at = 2 * (self.args[0].dim() - 1 - self.first.dim)
        if not any(self._argument(1, "pad")[at : at + 2]):
            yield from self._keep(self.first.dim)

    def _layer_norm(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if self.first.dim < self.args[0].dim() - len(self._argument(1, "normalized_shape")):
            yield from self._keep(self.first.dim)

    _rms_norm = _layer_norm

    def _view(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        old, new, at = self.args[0].shape, self.outputs[0].shape, self.first.dim
        is_plain = self.first.segment is None and len(self.first.sources) == 1 and at == len(old) - 1
        if is_plain and len(new) == at + 3 and new[:at] == old[:at] and new[at] == 3:
            # Queries, keys and values of a fused layer, each with its heads.
            size = old[at] // 3
            for start in range(0, old[at], size):
                self.flow.mark(self.outputs[0], replace(self.first, segment=(start, size)))
            yield self.outputs[0], replace(self.first, dim=at + 1, count=new[at + 1])
            return
        yield from self._keep(track_reshape(tuple(self.args[0].shape), tuple(self.outputs[0].shape), self.first.dim))

    _reshape = _view_as = _flatten = _unflatten = _reshape_as = _view

    def _transpose(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        rank = self.args[0].dim()
        one, other = (self._argument(place, name) % rank for place, name in ((1, "dim0"), (2, "dim1")))
        yield from self._keep({one: other, other: one}.get(self.first.dim, self.first.dim))

    _swapaxes = _transpose

    def _mT(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        one, other = self.args[0].dim() - 2, self.args[0].dim() - 1
        yield from self._keep({one: other, other: one}.get(self.first.dim, self.first.dim))

    def _permute(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        dims = self.args[1:] if isinstance(self._argument(1, "dims"), int) else self._argument(1, "dims")
        yield from self._keep([dim % self.args[0].dim() for dim in dims].index(self.first.dim))

    def _unbind(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        dim = self._argument(1, "dim", 0) % self.args[0].dim()
        if dim != self.first.dim:
            yield from self._keep(self.first.dim - (dim < self.first.dim))

    def _unsqueeze(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        place = self._argument(1, "dim") % self.outputs[0].dim()
        yield from self._keep(self.first.dim + (place <= self.first.dim))

    def _expand(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        yield from self._keep(self.first.dim + self.outputs[0].dim() - self.args[0].dim())

    def _repeat_interleave(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        yield from self._keep(self.first.dim, self.first.count)

    def _cat(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        dim = self._argument(1, "dim", 0) % self.outputs[0].dim()
        if dim != self.first.dim and self._stay():
            yield from self._keep(self.first.dim)

    _concat = _cat

    def _stay(self) -> bool:
        """Return True if each tensor of a list has its features in the dim of the first mark, or is constant there."""
        parts = [part for part in self._argument(0, "tensors") if part.numel()]  # skip an empty cache
        for part in parts:
            mark = self.flow.of(part)
            if mark is None and not uniform(part, self.first.dim - part.dim()):
                return False
            if mark is not None and mark.dim != self.first.dim:
                return False
        return True

    def _stack(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        if self._stay():
            dim = self._argument(1, "dim", 0) % self.outputs[0].dim()
            yield from self._keep(self.first.dim + (dim <= self.first.dim))

    def _split(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        dim: int = self._argument(2, "dim", 0) % self.args[0].dim()
        if dim != self.first.dim:
            yield from self._keep(self.first.dim)
            return
        sizes = self._argument(1, "split_size")
        sizes = self._argument(1, "split_size_or_sections") if sizes is None else sizes
        if self.name != "chunk" and not all(self._is_part(size) for size in tree_leaves(sizes)):
            self.reason = f"the sizes of segments are written down in `{self.name}`; use chunk"
            return
        start = 0
        for output in self.outputs:
            size = output.shape[dim]
            yield from self._segment(output, start, size)
            start += size

    _chunk = _split_with_sizes = _tensor_split = _split

    def _segment(self, output: torch.Tensor, start: int, size: int) -> Iterator[tuple[torch.Tensor, Mark]]:
        """Yield the output as a segment of a fused layer's features, if the input is the layer's full output."""
        whole = self.args[0]
        if self.first.segment is None and len(self.first.sources) == 1 and self.first.dim == whole.dim() - 1:
            yield output, replace(self.first, count=size, segment=(start, size))

    def _getitem(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        old = new = 0
        for part in parts_of_index(self.args[1], self.args[0].dim()) or ():
            if part is None:
                new += 1
                continue
            if old == self.first.dim:
                if _is_slice(part):
                    yield from self._narrowed(part, old, new)
                return
            old, new = old + 1, new + (not isinstance(part, int))

    def _narrowed(self, part: slice[Any, Any, Any], old: int, new: int) -> Iterator[tuple[torch.Tensor, Mark]]:
        """Yield a slice of the marked dim. old, new: its index before and after."""
        whole = self.args[0].shape[old]
        start, stop, stride = part.indices(whole)
        if (start, stop, stride) == (0, whole, 1):
            yield from self._keep(new)
        elif not all(self._is_part(end) for end in (part.start, part.stop) if end):
            self.reason = "where segments begin and end is written down; use chunk"
        elif part.step in (None, 1) and new == self.outputs[0].dim() - 1:
            yield from self._segment(self.outputs[0], start, stop - start)

    def _matmul(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        left, right = self.args[:2]
        one, other = self.flow.of(left), self.flow.of(right)
        if left.dim() != right.dim() or one is None or other is None or self.first.dim >= left.dim() - 2:
            return
        if one.dim == other.dim:
            yield from self._keep(self.first.dim)

    _bmm = _matmul

    def _scaled_dot_product_attention(self) -> Iterator[tuple[torch.Tensor, Mark]]:
        marks = [self.flow.of(one) for one in self.args[:3]]
        place = self.args[0].dim() - 3
        mask = self._argument(3, "attn_mask")
        known = self.flow.of(mask)
        if known is None and isinstance(mask, torch.Tensor) and mask.requires_grad and not self.flow.is_own(mask):
            self.reason = "its heads are combined with a mask with a gradient that is not from a sharded layer"
            return
        if known is not None and known.dim != mask.dim() - 3:
            return
        if all(mark is not None and mark.dim == place for mark in marks):
            yield from self._keep(place)


def _is_slice(part: Any) -> TypeGuard[slice[Any, Any, Any]]:
    return isinstance(part, slice)
