"""Rules for torch operations that treat each token separately, and the position of the tokens in their results.

Only listed operations are accepted: `TokenStep` raises `TokensMixed` for every other one. The rules are for `aten`
operations, which all torch functions are composed of.

If tokens were merged with other dims, the dim that holds them has size outer * count * inner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.private_torch import tree_leaves


@dataclass(frozen=True, slots=True)
class TokenDim:
    """Dim with the tokens of a tensor, their number, and the number of consecutive elements of one token in `dim`."""

    dim: int
    count: int
    inner: int = 1

    @property
    def ranks(self) -> int:
        """The smallest number of ranks above one that could share the tokens."""
        return next((each for each in range(2, self.count) if self.count % each == 0), self.count)


class TokensMixed(Exception):
    """Raised if an operation mixes tokens or has no rule."""


#: Each value of the result depends on the values at the same position only. torch tags most of these operations.
_POINTWISE = frozenset((
    "clone", "detach", "alias", "_to_copy", "lift_fresh", "contiguous", "copy_", "fill_", "zero_", "zeros_like",
    "ones_like", "full_like", "empty_like", "masked_fill", "masked_fill_", "where", "nan_to_num", "_conj", "real",
    "imag", "view_as_real_copy", "gelu", "silu", "softplus", "log_sigmoid_forward", "leaky_relu", "hardtanh", "elu",
    "prelu", "_prelu_kernel", "threshold", "sgn", "clamp", "clamp_", "lerp", "lerp_", "logit", "polar", "complex",
    "frac", "signbit", "hardshrink", "softshrink", "mish", "hardswish", "hardsigmoid", "relu", "relu_", "relu6",
    "mse_loss", "isnan", "isinf", "isfinite", "bitwise_not", "resolve_conj", "resolve_neg", "_neg_view",
))  # fmt: skip
#: Operations that reduce dims, and the index of the dims among the arguments.
_REDUCTIONS = {
    "sum": 1, "mean": 1, "amax": 1, "amin": 1, "var": 1, "std": 1, "var_mean": 1, "std_mean": 1, "prod": 1, "any": 1,
    "all": 1, "argmax": 1, "argmin": 1, "max": 1, "min": 1, "median": 1, "nanmedian": 1, "logsumexp": 1, "nansum": 1,
    "count_nonzero": 1, "norm": 2, "linalg_vector_norm": 2, "kthvalue": 2, "mode": 1, "aminmax": 1,
}  # fmt: skip
#: Operations along one dim that do not change the order in other dims, and the index of that dim among the arguments.
_ALONG = {
    "_softmax": 1, "_safe_softmax": 1, "_log_softmax": 1, "cumsum": 1, "cumsum_": 1, "cumprod": 1, "logcumsumexp": 1,
    "cummax": 1, "cummin": 1, "flip": 1, "roll": 2, "sort": 1, "topk": 2, "glu": 1, "_fft_r2c": 1, "_fft_c2r": 1,
    "_fft_c2c": 1, "split": 2, "split_with_sizes": 2, "slice": 1, "unsafe_split": 2, "unfold": 1,
    "unsafe_split_with_sizes": 2,
}  # fmt: skip
#: Default dim of operations whose call does not pass one.
_DIM_DEFAULTS = {"argmax": None, "argmin": None, "sort": -1, "topk": -1, "kthvalue": -1, "median": None, "mode": -1,
                 "split": 0, "split_with_sizes": 0, "slice": 0, "glu": -1}  # fmt: skip
#: In-place changes of a tensor's shape, which are not followed.
_RESHAPED = frozenset(("squeeze_", "unsqueeze_", "transpose_", "t_", "resize_", "set_", "as_strided_"))
_FRESH = frozenset(("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"))


@dataclass(frozen=True, slots=True)
class TokenStep:
    """One operation on tensors, at least one of which has tokens."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    of: Callable[[Any], TokenDim | None]
    #: Returns True if a tensor is constant along a dim (counted from the end).
    is_uniform: Callable[[torch.Tensor, int], bool]

    @property
    def name(self) -> str:
        """Name of the operation without its overload."""
        return str(self.func.overloadpacket).rpartition(".")[2]

    def marks(self) -> list[tuple[torch.Tensor, TokenDim]]:
        """Return the position of the tokens of each result.

        Raises:
            TokensMixed: if tokens are mixed, or the operation is unknown.
        """
        name = self.name
        if not str(self.func).startswith("aten.") or name in _RESHAPED:
            raise TokensMixed
        if name in _FRESH:
            return []
        if name in _REDUCTIONS:
            rule: Any = self._reduce
        elif name in _ALONG:
            rule = self._along
        else:
            rule = getattr(self, f"_op_{name.strip('_')}", None)
        tags = self.func.tags
        is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
        if rule is None and name not in _POINTWISE and not is_pointwise:
            raise TokensMixed
        return list((rule or self._pointwise)())

    def _get(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    @property
    def _source(self) -> tuple[torch.Tensor, TokenDim]:
        """Return the first argument and its token dim. Raise TokensMixed unless it is the only argument with tokens."""
        tensor = self.args[0]
        mark = self.of(tensor) if isinstance(tensor, torch.Tensor) else None
        if mark is None or any(self.of(leaf) is not None for leaf in tree_leaves((self.args[1:], self.kwargs))):
            raise TokensMixed
        return tensor, mark

    def _give(self, mark: TokenDim, dim: int, outputs: Sequence[torch.Tensor] | None = None) -> Iterator[Any]:
        for output in self.outputs if outputs is None else outputs:
            if not 0 <= dim < output.dim() or output.shape[dim] % (mark.count * mark.inner):
                raise TokensMixed
            yield output, replace(mark, dim=dim)

    def _pointwise(self) -> Iterator[Any]:
        rank = self.outputs[0].dim() if self.outputs else 0
        tensors = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]
        marks = [(leaf.dim() - mark.dim, mark) for leaf in tensors if (mark := self.of(leaf)) is not None]
        from_end, first = marks[0]
        if any(place != from_end or mark.inner != first.inner for place, mark in marks):
            raise TokensMixed
        for leaf in tensors:
            if self.of(leaf) is None and not self.is_uniform(leaf, from_end):
                raise TokensMixed
        yield from self._give(first, rank - from_end)

    def _reduce(self) -> Iterator[Any]:
        tensor, mark = self._source
        if self.name in ("max", "min") and isinstance(self._get(1, "other"), torch.Tensor):
            raise TokensMixed
        keys = ("dim", "dims")
        dims = self._get(_REDUCTIONS[self.name], "dim", _DIM_DEFAULTS.get(self.name))
        dims = self.kwargs.get(keys[1], dims) if dims is None else dims
        if dims is None or dims == [] or dims == ():
            raise TokensMixed
        gone = {dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
        if mark.dim in gone:
            raise TokensMixed
        kept = self.outputs[0].dim() == tensor.dim()
        yield from self._give(mark, mark.dim - (0 if kept else sum(dim < mark.dim for dim in gone)))

    def _along(self) -> Iterator[Any]:
        tensor, mark = self._source
        dims = self._get(_ALONG[self.name], "dims" if self.name in ("flip", "roll") else "dim")
        dims = _DIM_DEFAULTS.get(self.name) if dims is None else dims
        if dims is None or dims == []:
            raise TokensMixed
        used = {dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
        if mark.dim in used:
            same = all(output.shape == tensor.shape for output in self.outputs)
            if self.name not in ("slice", "split", "split_with_sizes") or not same or self._get(4, "step", 1) != 1:
                raise TokensMixed
        yield from self._give(mark, mark.dim)

    def _op_view(self) -> Iterator[Any]:
        tensor, mark = self._source
        new = token_dim_after(tuple(tensor.shape), tuple(self.outputs[0].shape), mark)
        if new is None:
            raise TokensMixed
        yield from self._give(new, new.dim)

    _op_reshape = _op_unsafe_view = _op_reshape_alias = _op_view

    def _op_view_as_complex(self) -> Iterator[Any]:
        tensor, mark = self._source
        if mark.dim == tensor.dim() - 1:
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    def _op_view_as_real(self) -> Iterator[Any]:
        _, mark = self._source
        yield from self._give(mark, mark.dim)

    def _op_transpose(self) -> Iterator[Any]:
        tensor, mark = self._source
        one, other = (self._get(at, name) % tensor.dim() for at, name in ((1, "dim0"), (2, "dim1")))
        yield from self._give(mark, {one: other, other: one}.get(mark.dim, mark.dim))

    def _op_t(self) -> Iterator[Any]:
        tensor, mark = self._source
        yield from self._give(mark, tensor.dim() - 1 - mark.dim)

    def _op_permute(self) -> Iterator[Any]:
        tensor, mark = self._source
        yield from self._give(mark, [dim % tensor.dim() for dim in self._get(1, "dims")].index(mark.dim))

    def _op_unsqueeze(self) -> Iterator[Any]:
        _, mark = self._source
        yield from self._give(mark, mark.dim + (self._get(1, "dim") % self.outputs[0].dim() <= mark.dim))

    def _op_squeeze(self) -> Iterator[Any]:
        tensor, mark = self._source
        dims = self._get(1, "dim", [*range(tensor.dim())])
        gone = {dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims)}
        gone = {dim for dim in gone if tensor.shape[dim] == 1}
        yield from self._give(mark, mark.dim - sum(dim < mark.dim for dim in gone))

    def _op_expand(self) -> Iterator[Any]:
        tensor, mark = self._source
        yield from self._give(mark, mark.dim + self.outputs[0].dim() - tensor.dim())

    def _op_repeat(self) -> Iterator[Any]:
        tensor, mark = self._source
        yield from self._give(mark, mark.dim + self.outputs[0].dim() - tensor.dim())

    def _op_select(self) -> Iterator[Any]:
        tensor, mark = self._source
        dim = self._get(1, "dim") % tensor.dim()
        if dim == mark.dim:
            raise TokensMixed
        yield from self._give(mark, mark.dim - (dim < mark.dim))

    def _op_unbind(self) -> Iterator[Any]:
        tensor, mark = self._source
        dim = self._get(1, "dim", 0) % tensor.dim()
        if dim == mark.dim:
            raise TokensMixed
        yield from self._give(mark, mark.dim - (dim < mark.dim))

    def _op_diagonal(self) -> Iterator[Any]:
        tensor, mark = self._source
        used = {self._get(at, name, default) % tensor.dim() for at, name, default in ((2, "dim1", 0), (3, "dim2", 1))}
        if mark.dim in used:
            raise TokensMixed
        yield from self._give(mark, mark.dim - sum(dim < mark.dim for dim in used))

    def _op_tril(self) -> Iterator[Any]:
        tensor, mark = self._source
        if mark.dim >= tensor.dim() - 2:
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    _op_triu = _op_tril

    def _op_constant_pad_nd(self) -> Iterator[Any]:
        tensor, mark = self._source
        at = 2 * (tensor.dim() - 1 - mark.dim)
        if any(self._get(1, "pad")[at : at + 2]):
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    def _joined(self, dim: int, rank: int) -> TokenDim:
        """Check tensors that are concatenated along a dim other than the tokens'. Return the position of the tokens."""
        parts = [part for part in self.args[0] if part.numel()]
        marks = [mark for part in parts if (mark := self.of(part)) is not None]
        for part in parts:
            if (mark := self.of(part)) is None:
                if not self.is_uniform(part, rank - marks[0].dim):
                    raise TokensMixed
            elif mark != marks[0]:
                raise TokensMixed
        if dim == marks[0].dim:
            raise TokensMixed
        return marks[0]

    def _op_cat(self) -> Iterator[Any]:
        rank = self.outputs[0].dim()
        mark = self._joined(self._get(1, "dim", 0) % rank, rank)
        yield from self._give(mark, mark.dim)

    def _op_stack(self) -> Iterator[Any]:
        rank = self.outputs[0].dim()
        dim = self._get(1, "dim", 0) % rank
        mark = self._joined(-1, rank - 1)
        yield from self._give(mark, mark.dim + (dim <= mark.dim))

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> TokenDim:
        one, other = self.of(left), self.of(right)
        rank = left.dim()
        if one is not None and one.dim < rank - 2:  # a batched matmul, with tokens in a batch dim
            fits = other == one if other is not None else self.is_uniform(right, rank - one.dim)
            if fits:
                return one
        elif one is not None and other is None and one.dim == rank - 2:
            return one
        elif (
            other is not None
            and one is None
            and (other.dim == rank - 1 or (other.dim < rank - 2 and self.is_uniform(left, rank - other.dim)))
        ):
            return other
        raise TokensMixed

    def _op_cdist_forward(self) -> Iterator[Any]:
        """Follow distances between tokens and rows without tokens."""
        left, right = self.args[:2]
        mark = self.of(left)
        if mark is None or self.of(right) is not None or mark.dim != left.dim() - 2:
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    _op_euclidean_dist = _op_cdist_forward

    def _op_mm(self) -> Iterator[Any]:
        mark = self._product(*self.args[:2])
        yield from self._give(mark, mark.dim)

    _op_bmm = _op_mm

    def _op_addmm(self) -> Iterator[Any]:
        mark = self._product(*self.args[1:3])
        if self.of(self.args[0]) is not None or not self.is_uniform(self.args[0], self.outputs[0].dim() - mark.dim):
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    _op_baddbmm = _op_addmm

    def _op_mv(self) -> Iterator[Any]:
        _, mark = self._source
        if mark.dim != 0:
            raise TokensMixed
        yield from self._give(mark, 0)

    def _op_linear(self) -> Iterator[Any]:
        tensor, mark = self._source
        if mark.dim == tensor.dim() - 1:
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    def _op_native_layer_norm(self) -> Iterator[Any]:
        tensor, mark = self._source
        if mark.dim >= tensor.dim() - len(self._get(1, "normalized_shape")):
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    _op_layer_norm = _op_rms_norm = _op_fused_rms_norm = _op_native_layer_norm

    def _op_native_group_norm(self) -> Iterator[Any]:
        _, mark = self._source
        if mark.dim != 0:
            raise TokensMixed
        yield from self._give(mark, 0)

    def _op_convolution(self) -> Iterator[Any]:
        _, mark = self._source
        weight, at = self._get(1, "weight"), mark.dim - 2
        stride, padding = self._get(3, "stride"), self._get(4, "padding")
        plain = mark.dim >= 2 and weight.shape[mark.dim] == 1 and mark.inner == 1
        plain = plain and stride[at % len(stride)] == 1 and not padding[at % len(padding)]
        if mark.dim != 0 and not plain:
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    _op_convolution_overrideable = _op_mkldnn_convolution = _op_convolution

    def _op_embedding(self) -> Iterator[Any]:
        mark = self.of(self._get(1, "indices"))
        if mark is None or self.of(self.args[0]) is not None:
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    def _op_index(self) -> Iterator[Any]:
        """Follow a table lookup by indices that have tokens. The table must not have tokens."""
        table, indices = self.args[:2]
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if self.of(table) is not None or [dim for dim, _ in given] != [given[0][0] + n for n in range(len(given))]:
            raise TokensMixed
        rank = max(index.dim() for _, index in given)
        marks = [(mark.dim + rank - index.dim(), mark) for _, index in given if (mark := self.of(index)) is not None]
        dim, mark = marks[0]
        for _, index in given:
            other = self.of(index)
            if index.dtype in (torch.bool, torch.uint8):
                raise TokensMixed
            if other is None and not self.is_uniform(index, rank - dim):
                raise TokensMixed
            if other is not None and (other.dim + rank - index.dim(), other.inner) != (dim, mark.inner):
                raise TokensMixed
        yield from self._give(mark, given[0][0] + dim)

    def _op_index_select(self) -> Iterator[Any]:
        tensor, index = self._get(0, "self"), self._get(2, "index")
        dim, mark = self._get(1, "dim") % tensor.dim(), self.of(tensor)
        if mark is None:
            mark = self.of(index)
            assert mark is not None
            yield from self._give(mark, dim)
        elif self.of(index) is not None or mark.dim == dim:
            raise TokensMixed
        else:
            yield from self._give(mark, mark.dim)

    def _op_gather(self) -> Iterator[Any]:
        """Follow a gather or scatter along a dim other than the token dim.

        Tensors without tokens must be constant along the dim of the tokens.
        """
        tensor = self.args[0]
        dim = self._get(1, "dim") % tensor.dim()
        others = [one for one in (tensor, *self.args[2:]) if isinstance(one, torch.Tensor) and one.dim()]
        marks = [mark for one in others if (mark := self.of(one)) is not None]
        for one in others:
            mark = self.of(one)
            if mark is None and not self.is_uniform(one, tensor.dim() - marks[0].dim):
                raise TokensMixed
            if mark is not None and (mark.dim, mark.inner) != (marks[0].dim, marks[0].inner):
                raise TokensMixed
        if dim == marks[0].dim:
            raise TokensMixed
        yield from self._give(marks[0], marks[0].dim)

    _op_scatter = _op_scatter_add = _op_scatter_reduce = _op_gather

    def _op_index_put(self) -> Iterator[Any]:
        """Follow a write of one number to all tokens that a mask selects."""
        tensor, indices, value = self.args[:3]
        mark, chosen = self.of(tensor), self.of(indices[0])
        plain = len(indices) == 1 and indices[0].dtype is torch.bool and value.numel() == 1 and self.of(value) is None
        if mark is None or mark != chosen or not plain:
            raise TokensMixed
        yield from self._give(mark, mark.dim)

    def _op_native_batch_norm(self) -> Iterator[Any]:
        """Follow a batch norm with stored statistics. One with batch statistics mixes tokens."""
        _, mark = self._source
        if mark.dim == 1 or self._get(5, "training"):
            raise TokensMixed
        yield from self._give(mark, mark.dim, self.outputs[:1])

    _op_cudnn_batch_norm = _op_native_batch_norm

    def _op_native_batch_norm_legit_no_training(self) -> Iterator[Any]:
        _, mark = self._source
        if mark.dim == 1:
            raise TokensMixed
        yield from self._give(mark, mark.dim, self.outputs[:1])


def token_dim_after(old: tuple[int, ...], new: tuple[int, ...], mark: TokenDim) -> TokenDim | None:
    """Return the position of the tokens after a reshape, or None if no single dim holds all of them."""
    if 0 in old or math.prod(old[: mark.dim + 1]) * math.prod(old[mark.dim + 1 :]) != math.prod(new):
        return None
    stride = math.prod(old[mark.dim + 1 :]) * mark.inner  # elements between consecutive tokens
    after = math.prod(new)
    for dim, size in enumerate(new):
        span, after = after, after // size
        if span >= stride * mark.count and after <= stride and stride % after == 0:
            inner = stride // after
            return TokenDim(dim, mark.count, inner) if size % (inner * mark.count) == 0 else None
    return None
