"""JAX forms of ATen operators, by the operator's name without its overload.

A function takes the operator's arguments in the order of its ATen schema. The interpreter casts its result to the
operator's dtype, so functions need not follow torch's rules of type promotion.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

Array = Any
#: dtypes of torch by their names in numpy.
DTYPES = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8",
    torch.bool: "bool",
}  # fmt: skip


def dtype_of(dtype: torch.dtype | None, default: torch.dtype = torch.float32) -> str:
    return DTYPES[default if dtype is None else dtype]


# Shapes and indices.


def _expand(x: Array, size: Sequence[int], implicit: bool = False) -> Array:
    lead = len(size) - x.ndim
    return jnp.broadcast_to(x, [x.shape[i - lead] if n == -1 else n for i, n in enumerate(size)])


def _slice(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    index: list[Any] = [slice(None)] * x.ndim
    index[dim] = slice(start, end, step)
    return x[tuple(index)]


def _squeeze(x: Array, dims: Sequence[int] | int | None = None) -> Array:
    chosen = range(x.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    return jnp.squeeze(x, tuple(dim for dim in chosen if x.shape[dim] == 1))


def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    return x[tuple(slice(None) if index is None else index for index in indices)]


def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    place = x.at[tuple(slice(None) if index is None else index for index in indices)]
    return place.add(values.astype(x.dtype)) if accumulate else place.set(values.astype(x.dtype))


def _along(x: Array, dim: int, index: Array) -> tuple[Array, ...]:
    """Return the indices of the elements x[..., index, ...] for gather and scatter."""
    grid = list(jnp.meshgrid(*(jnp.arange(n) for n in index.shape), indexing="ij")) if index.ndim else []
    if grid:
        grid[dim] = index
    return tuple(grid)


def _gather(x: Array, dim: int, index: Array, sparse_grad: bool = False) -> Array:
    if not x.ndim:
        return x
    others = [axis for axis in range(x.ndim) if axis != dim % x.ndim]
    if all(x.shape[axis] == index.shape[axis] for axis in others):
        return jnp.take_along_axis(x, index, dim)  # keeps the sharding of the other dims
    return x[_along(x, dim, index)]


def _scatter(x: Array, dim: int, index: Array, src: Array) -> Array:
    source = src if jnp.ndim(src) == 0 else src[tuple(slice(n) for n in index.shape)]
    return x.at[_along(x, dim, index)].set(source)


def _scatter_add(x: Array, dim: int, index: Array, src: Array) -> Array:
    return x.at[_along(x, dim, index)].add(src[tuple(slice(n) for n in index.shape)])


def _select_scatter(x: Array, src: Array, dim: int, index: int) -> Array:
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = index
    return x.at[tuple(place)].set(src)


def _slice_scatter(
    x: Array, src: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    place: list[Any] = [slice(None)] * x.ndim
    place[dim] = slice(start, end, step)
    return x.at[tuple(place)].set(src)


def _split(x: Array, sizes: Sequence[int], dim: int = 0) -> list[Array]:
    return jnp.split(x, np.cumsum(sizes)[:-1].tolist(), dim)


def _unbind(x: Array, dim: int = 0) -> list[Array]:
    return [lax.index_in_dim(x, i, dim, False) for i in range(x.shape[dim])]


def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


def _pad(x: Array, pad: Sequence[int], value: float = 0.0) -> Array:
    widths = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return lax.pad(x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in widths])


def _embedding(
    weight: Array, index: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    rows = jnp.take(weight, index, axis=0, mode="clip")
    if padding_idx < 0:
        return rows
    return jnp.where((index == padding_idx)[..., None], lax.stop_gradient(rows), rows)


def _arange(start: float, end: float, step: float = 1, *, dtype: torch.dtype | None = None, **options: Any) -> Array:
    is_whole = all(isinstance(one, int) for one in (start, end, step))
    return jnp.arange(start, end, step, dtype=dtype_of(dtype, torch.int64 if is_whole else torch.float32))


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Array:
    return jnp.full(tuple(size), value, None if dtype is None else dtype_of(dtype))


def _full_like(x: Array, value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Array:
    return jnp.full(x.shape, value, x.dtype if dtype is None else dtype_of(dtype))


def _triangle(keep: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, diagonal=0: keep(x, diagonal)


# Reductions.


def _axes(dims: Sequence[int] | int | None) -> tuple[int, ...] | None:
    if dims is None:
        return None
    return (dims,) if isinstance(dims, int) else tuple(dims) or None


def _reduction(reduce: Callable[..., Array]) -> Callable[..., Array]:
    def reduced(
        x: Array, dims: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Array:
        wide = x if dtype is None else x.astype(dtype_of(dtype))
        return reduce(wide, axis=_axes(dims), keepdims=keepdim)

    return reduced


def _var(x: Array, dims: Sequence[int] | None = None, *, correction: Any = 1, keepdim: bool = False) -> Array:
    return jnp.var(x, axis=_axes(dims), ddof=1 if correction is None else correction, keepdims=keepdim)


def _vector_norm(
    x: Array, order: float = 2, dims: Sequence[int] | None = None, keepdim: bool = False, *,
    dtype: torch.dtype | None = None,
) -> Array:  # fmt: skip
    x = jnp.abs(x if dtype is None else x.astype(dtype_of(dtype)))
    if order == 0:
        return jnp.sum(x != 0, axis=_axes(dims), keepdims=keepdim).astype(x.dtype)
    if order in (math.inf, -math.inf):
        return (jnp.max if order > 0 else jnp.min)(x, axis=_axes(dims), keepdims=keepdim)
    total = jnp.sum(x if order == 1 else _pow(x, order), axis=_axes(dims), keepdims=keepdim)
    if order == 1:
        return total
    # Backward of a norm of zeros is 0, as in torch.
    root = jnp.where(total == 0, 1, total)
    return jnp.where(total == 0, 0, jnp.sqrt(root) if order == 2 else root ** (1 / order))


def _extreme(choose: Callable[..., Array], pick: Callable[..., Array]) -> Callable[..., tuple[Array, Array]]:
    def found(x: Array, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is None:
            return pick(x)
        index = choose(x, axis=dim, keepdims=True)
        values = jnp.take_along_axis(x, index, dim)
        return (values, index) if keepdim else (jnp.squeeze(values, dim), jnp.squeeze(index, dim))

    return found


def _topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    moved = jnp.moveaxis(x, dim, -1)
    _, index = lax.top_k(lax.stop_gradient(moved if largest else -moved), k)
    values = jnp.take_along_axis(moved, index, -1)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim)


def _sort(x: Array, dim: int = -1, descending: bool = False, *, stable: bool = True) -> tuple[Array, Array]:
    index = jnp.argsort(lax.stop_gradient(x), axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, index, dim), index


def _searchsorted(
    sorted_sequence: Array, values: Array, *, out_int32: bool = False, right: bool = False, side: str | None = None,
    sorter: Array | None = None,
) -> Array:  # fmt: skip
    which = side or ("right" if right else "left")

    def find(ordered: Array, one: Array) -> Array:
        return jnp.searchsorted(ordered, one, side=which)

    for _ in range(sorted_sequence.ndim - 1):
        find = jax.vmap(find)
    return find(sorted_sequence, values)


def _histc(x: Array, bins: int = 100, min: float = 0, max: float = 0) -> Array:
    place = jnp.floor((x - min) / (max - min) * bins).astype(jnp.int32)
    place = jnp.where(x == max, bins - 1, place)
    inside = (x >= min) & (x <= max)
    return jnp.zeros(bins, x.dtype).at[jnp.where(inside, place, bins)].add(1, mode="drop")


# Layers.


def _wide(dtype: Any) -> Any:
    """Return the dtype in which torch adds up numbers of `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def _matmul(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, preferred_element_type=_wide(x.dtype) if x.dtype.kind == "V" else None).astype(x.dtype)


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    out = jnp.einsum("...d,fd->...f", x, weight)
    return out if bias is None else out + bias


def _addmm(bias: Array, x: Array, y: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    product = jnp.matmul(x, y)
    return (product if alpha == 1 else alpha * product) + (bias if beta == 1 else beta * bias)


def _softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    return jax.nn.softmax(x.astype(_wide(x.dtype)), axis=dim)


def _log_softmax(x: Array, dim: int, half_to_float: bool = False) -> Array:
    return jax.nn.log_softmax(x.astype(_wide(x.dtype)), axis=dim)


def attention(
    q: Array, k: Array, v: Array, attn_mask: Array | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Array:  # fmt: skip
    """Compute softmax(q k^T * scale) v. Queries without a visible key get 0, as in torch."""
    if k.shape[-3:-2] != q.shape[-3:-2] and q.ndim > 2:
        times = q.shape[-3] // k.shape[-3]
        k, v = jnp.repeat(k, times, -3), jnp.repeat(v, times, -3)
    wide = _wide(q.dtype)
    scores = jnp.einsum("...tc,...sc->...ts", q, k, preferred_element_type=wide)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = jnp.where(jnp.tri(*scores.shape[-2:], dtype=bool), scores, -jnp.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == jnp.bool_
        scores = jnp.where(attn_mask, scores, -jnp.inf) if is_bool else scores + attn_mask.astype(wide)
    highest = lax.stop_gradient(scores.max(-1, keepdims=True))
    powers = jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0))
    total = powers.sum(-1, keepdims=True)
    shares = powers / jnp.where(total == 0, 1, total)
    return jnp.einsum("...ts,...sc->...tc", shares.astype(v.dtype), v, preferred_element_type=wide).astype(q.dtype)


def _document_attention(q: Array, k: Array, v: Array, starts: Array, is_causal: bool) -> tuple[Array, None]:
    """Compute attention within documents. starts: (B, M), padded with the number of tokens."""
    places = jnp.arange(q.shape[2])
    ids = jax.vmap(lambda row: jnp.searchsorted(row, places, side="right"))(starts)
    seen = ids[:, None, :, None] == ids[:, None, None, :]
    return attention(q, k, v, seen & (places[:, None] >= places) if is_causal else seen), None


def _normalized(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    wide = x.astype(_wide(x.dtype))
    mean = wide.mean(axes, keepdims=True)
    rstd = lax.rsqrt(jnp.square(wide - mean).mean(axes, keepdims=True) + eps)
    return (wide - mean) * rstd, mean, rstd


def _native_layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    out, mean, rstd = _normalized(x, tuple(range(x.ndim - len(shape), x.ndim)), eps)
    out = out if weight is None else out * weight
    return (out if bias is None else out + bias), mean, rstd


def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None = None, bias: Array | None = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Array:  # fmt: skip
    return _native_layer_norm(x, shape, weight, bias, eps)[0]


def _rms_norm(x: Array, shape: Sequence[int], weight: Array | None = None, eps: float | None = None) -> Array:
    wide = x.astype(_wide(x.dtype))
    least = float(jnp.finfo(x.dtype).eps) if eps is None else eps
    out = wide * lax.rsqrt(jnp.square(wide).mean(tuple(range(x.ndim - len(shape), x.ndim)), keepdims=True) + least)
    return out if weight is None else out * weight


def _group_norm(
    x: Array, weight: Array | None, bias: Array | None, num: int, channels: int, pixels: int, groups: int, eps: float
) -> tuple[Array, Array, Array]:
    grouped = x.reshape(x.shape[0], groups, -1)
    out, mean, rstd = _normalized(grouped, (2,), eps)
    out, of_channel = out.reshape(x.shape), (1, -1, *(1,) * (x.ndim - 2))
    out = out if weight is None else out * weight.reshape(of_channel)
    out = out if bias is None else out + bias.reshape(of_channel)
    return out, mean.squeeze(-1), rstd.squeeze(-1)


def _batch_norm(
    x: Array, weight: Array | None, bias: Array | None, running_mean: Array, running_var: Array, training: bool,
    momentum: float, eps: float,
) -> tuple[Array, ...]:  # fmt: skip
    of_channel, axes = (1, -1, *(1,) * (x.ndim - 2)), (0, *range(2, x.ndim))
    if training:
        out, mean, rstd = _normalized(x, axes, eps)
        count = x.size // x.shape[1]
        var = (1 / jnp.square(rstd) - eps) * count / max(count - 1, 1)
        running_mean = running_mean * (1 - momentum) + momentum * mean.reshape(-1)
        running_var = running_var * (1 - momentum) + momentum * var.reshape(-1)
    else:
        rstd = lax.rsqrt(running_var + eps).reshape(of_channel)
        out, mean = (x - running_mean.reshape(of_channel)) * rstd, running_mean
    out = out if weight is None else out * weight.reshape(of_channel)
    out = out if bias is None else out + bias.reshape(of_channel)
    stopped = (lax.stop_gradient(one) for one in (running_mean, running_var))
    return out, mean.reshape(-1), rstd.reshape(-1), *stopped


def _convolution(
    x: Array, weight: Array, bias: Array | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Array:  # fmt: skip
    dims = len(stride)
    letters = "DHW"[-dims:]
    layout = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    if not transposed:
        pads = [(p, p) for p in padding]
        out = lax.conv_general_dilated(
            x, weight, stride, pads, rhs_dilation=dilation, dimension_numbers=layout, feature_group_count=groups
        )
    else:
        per_group, kernel = weight.shape[1], weight.shape[2:]
        flipped = jnp.flip(weight, tuple(range(2, 2 + dims))).reshape(groups, -1, per_group, *kernel)
        flipped = jnp.swapaxes(flipped, 1, 2).reshape(groups * per_group, -1, *kernel)
        each = zip(kernel, dilation, padding, output_padding, strict=True)
        pads = [(d * (k - 1) - p, d * (k - 1) - p + more) for k, d, p, more in each]
        out = lax.conv_general_dilated(
            x, flipped, (1,) * dims, pads, lhs_dilation=stride, rhs_dilation=dilation, dimension_numbers=layout,
            feature_group_count=groups,
        )  # fmt: skip
    return out if bias is None else out + bias.reshape(1, -1, *(1,) * dims)


def _max_pool(
    x: Array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[Array, None]:  # fmt: skip
    window, steps, pads, holes = _windows(x, kernel, stride, padding, dilation)
    # A constant: JAX differentiates a maximum over windows only whose start is the constant -inf.
    least = np.array(-np.inf, x.dtype)
    return lax.reduce_window(x, least, lax.max, window, steps, pads, window_dilation=holes), None


def _avg_pool(
    x: Array, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Array:  # fmt: skip
    window, steps, pads, _ = _windows(x, kernel, stride, padding, (1,))

    def total(one: Array) -> Array:
        return lax.reduce_window(one, np.array(0, x.dtype), lax.add, window, steps, pads)

    if divisor_override or count_include_pad:
        return total(x) / (divisor_override or math.prod(window))
    return total(x) / total(jnp.ones_like(x))


def _windows(
    x: Array, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> tuple[Any, Any, Any, Any]:
    dims, lead = len(kernel), x.ndim - len(kernel)

    def full(values: Sequence[int]) -> list[int]:
        return list(values) * dims if len(values) == 1 else list(values)

    pads = [(0, 0)] * lead + [(p, p) for p in full(padding)]
    ones = (1,) * lead
    return (*ones, *kernel), (*ones, *full(stride or kernel)), pads, (*ones, *full(dilation))


def _nearest(x: Array, size: Sequence[int] | None, scales: Any = None, *more: float | None) -> Array:
    if size is None:
        size = [math.floor(n * scale) for n, scale in zip(x.shape[2:], scales, strict=True)]
    for dim, new in enumerate(size, x.ndim - len(size)):
        x = jnp.take(x, np.arange(new) * x.shape[dim] // new, dim)
    return x


def _nll_loss(x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int) -> tuple[Array, Array]:
    kept = target != ignore_index
    safe = jnp.where(kept, target, 0)
    dim = 1 if x.ndim > 1 else 0
    picked = jnp.take_along_axis(x, jnp.expand_dims(safe, dim), dim).squeeze(dim)
    weights = (jnp.ones_like(picked) if weight is None else weight[safe]) * kept
    losses, total = -picked * weights, weights.sum()
    return (losses, losses.sum() / total, losses.sum())[reduction], total


def _grouped_mm(x: Array, weights: Array, offs: Array) -> Array:
    """Multiply the rows of each group by its matrix. offs: cumulative row counts."""
    offs = jnp.stack(offs) if isinstance(offs, list | tuple) else offs
    sizes = jnp.diff(offs.astype(jnp.int32), prepend=0)
    return lax.ragged_dot(x, weights, sizes, preferred_element_type=_wide(x.dtype)).astype(x.dtype)


@jax.custom_vjp
def _attach(weights: Array, aux: Array, scale: Array) -> Array:
    """Return `weights`; backward adds `scale` to the gradient of the auxiliary loss."""
    return weights


_attach.defvjp(lambda weights, aux, scale: (weights, (aux, scale)), lambda kept, grad: (
    grad, jnp.broadcast_to(kept[1], kept[0].shape).astype(kept[0].dtype), jnp.zeros_like(kept[1])
))  # fmt: skip


# The table.


def _pow(x: Array, power: Any) -> Array:
    if isinstance(power, float) and power.is_integer() and abs(power) < 64:
        power = int(power)
    return lax.integer_pow(x, power) if isinstance(power, int) and hasattr(x, "dtype") else jnp.power(x, power)


def _scaled(combine: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    return lambda x, y, *, alpha=1: combine(x, y if alpha == 1 else alpha * y)


def _divide(x: Array, y: Array, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    return jnp.trunc(x / y) if rounding_mode == "trunc" else x / y


def _clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    x = x if low is None else jnp.where(x < low, low, x)
    return x if high is None else jnp.where(x > high, high, x)


def _cast(x: Array, *, dtype: torch.dtype | None = None, **options: Any) -> Array:
    return x if dtype is None else jnp.asarray(x).astype(dtype_of(dtype))


def _same(x: Array, *args: Any, **options: Any) -> Array:
    return x


def _nothing(*args: Any, **options: Any) -> None:
    return None


def _of_one(form: Callable[[Array], Array]) -> Callable[..., Array]:
    return lambda x, **options: form(x)


_SAME = ("clone", "alias", "contiguous", "lift_fresh_copy", "_local_scalar_dense", "view_as", "to")
_NOTHING = (
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range",
    "sym_constrain_range_for_size",
)  # fmt: skip
_UNARY: dict[str, Callable[..., Array]] = {
    "abs": jnp.abs, "neg": jnp.negative, "exp": jnp.exp, "exp2": jnp.exp2, "expm1": jnp.expm1, "log": jnp.log,
    "log1p": jnp.log1p, "log2": jnp.log2, "sqrt": jnp.sqrt, "rsqrt": lax.rsqrt, "sin": jnp.sin, "cos": jnp.cos,
    "tan": jnp.tan, "tanh": jnp.tanh, "sinh": jnp.sinh, "cosh": jnp.cosh, "asin": jnp.arcsin, "acos": jnp.arccos,
    "atan": jnp.arctan, "erf": jax.scipy.special.erf, "sigmoid": jax.nn.sigmoid, "floor": jnp.floor, "ceil": jnp.ceil,
    "round": jnp.round, "trunc": jnp.trunc, "sign": jnp.sign, "reciprocal": jnp.reciprocal, "isnan": jnp.isnan,
    "isinf": jnp.isinf, "logical_not": jnp.logical_not, "bitwise_not": jnp.bitwise_not, "silu": jax.nn.silu,
    "relu": jax.nn.relu, "square": jnp.square,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Array]] = {
    "mul": jnp.multiply, "eq": jnp.equal, "ne": jnp.not_equal, "lt": jnp.less, "le": jnp.less_equal,
    "gt": jnp.greater, "ge": jnp.greater_equal, "logical_and": jnp.logical_and, "logical_or": jnp.logical_or,
    "logical_xor": jnp.logical_xor, "bitwise_and": jnp.bitwise_and, "bitwise_or": jnp.bitwise_or,
    "bitwise_xor": jnp.bitwise_xor, "maximum": jnp.maximum, "minimum": jnp.minimum, "remainder": jnp.remainder,
    "fmod": jnp.fmod, "floor_divide": jnp.floor_divide, "atan2": jnp.arctan2, "mm": jnp.matmul, "bmm": jnp.matmul,
    "matmul": jnp.matmul, "dot": jnp.matmul, "mv": jnp.matmul,
}  # fmt: skip
#: JAX functions by the operator's namespace and name.
FORMS: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}": _of_one(form) for name, form in _UNARY.items()},
    **{f"aten.{name}": form for name, form in _BINARY.items()},
    **{f"aten.{name}": _same for name in _SAME},
    **{f"aten.{name}": _nothing for name in _NOTHING},
    "aten.add": _scaled(operator.add), "aten.sub": _scaled(operator.sub),
    "aten.rsub": lambda x, y, alpha=1: y - (x if alpha == 1 else alpha * x),
    "aten.div": _divide, "aten.pow": _pow, "aten.clamp": _clamp, "aten._to_copy": _cast,
    "aten.clamp_min": lambda x, low: _clamp(x, low), "aten.clamp_max": lambda x, high: _clamp(x, None, high),
    "aten.hardtanh": lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    "aten.where": jnp.where, "aten.masked_fill": lambda x, mask, value: jnp.where(mask, value, x),
    "aten.gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "aten.elu": lambda x, alpha=1.0, scale=1.0, inner=1.0: scale * jnp.where(
        x > 0, x, alpha * jnp.expm1(inner * jnp.where(x > 0, 0, x))),
    "aten.leaky_relu": lambda x, slope=0.01: jnp.where(x > 0, x, slope * x),
    "aten.softplus": lambda x, beta=1.0, threshold=20.0: jnp.where(
        x * beta > threshold, x, jax.nn.softplus(x * beta) / beta),
    "aten.hardswish": jax.nn.hard_swish, "aten.hardsigmoid": jax.nn.hard_sigmoid,
    "aten.view": jnp.reshape, "aten.reshape": jnp.reshape, "aten._unsafe_view": jnp.reshape, "aten.expand": _expand,
    "aten.permute": jnp.transpose, "aten.transpose": jnp.swapaxes, "aten.t": jnp.transpose, "aten.slice": _slice,
    "aten.select": lambda x, dim, index: lax.index_in_dim(x, index, dim, False), "aten.unsqueeze": jnp.expand_dims,
    "aten.squeeze": _squeeze, "aten.index": _index, "aten.index_put": _index_put, "aten.gather": _gather,
    "aten.index_select": lambda x, dim, index: jnp.take(x, index, dim), "aten.scatter": _scatter,
    "aten.scatter_add": _scatter_add, "aten.select_scatter": _select_scatter, "aten.slice_scatter": _slice_scatter,
    "aten.cat": lambda parts, dim=0: jnp.concatenate([x for x in parts if x.shape != (0,)] or parts, dim),
    "aten.stack": lambda parts, dim=0: jnp.stack(parts, dim), "aten.split_with_sizes": _split,
    "aten.unbind": _unbind, "aten.repeat": _repeat, "aten.flip": lambda x, dims: jnp.flip(x, tuple(dims)),
    "aten.roll": lambda x, shifts, dims=(): jnp.roll(x, tuple(shifts), tuple(dims) or None),
    "aten.constant_pad_nd": _pad, "aten.tril": _triangle(jnp.tril), "aten.triu": _triangle(jnp.triu),
    "aten.embedding": _embedding, "aten.arange": _arange, "aten.full": _full, "aten.full_like": _full_like,
    "aten.scalar_tensor": lambda value, dtype=None, **options: jnp.asarray(value, dtype_of(dtype)),
    "aten.empty": lambda size, **options: _full(size, 0, **options),
    "aten.empty_permuted": lambda size, order, **options: _full(size, 0, **options),
    "aten.empty_like": lambda x, **options: jnp.zeros_like(x),
    "aten.sum": _reduction(jnp.sum), "aten.mean": _reduction(jnp.mean), "aten.amax": _reduction(jnp.max),
    "aten.amin": _reduction(jnp.min), "aten.any": _reduction(jnp.any), "aten.all": _reduction(jnp.all),
    "aten.prod": _reduction(jnp.prod), "aten.var": _var, "aten.max": _extreme(jnp.argmax, jnp.max),
    "aten.min": _extreme(jnp.argmin, jnp.min), "aten.topk": _topk, "aten.sort": _sort,
    "aten.argmax": lambda x, dim=None, keepdim=False: jnp.argmax(x, dim, keepdims=keepdim),
    "aten.argmin": lambda x, dim=None, keepdim=False: jnp.argmin(x, dim, keepdims=keepdim),
    "aten.cumsum": lambda x, dim, *, dtype=None: jnp.cumsum(_cast(x, dtype=dtype), dim),
    "aten.cumprod": lambda x, dim, *, dtype=None: jnp.cumprod(_cast(x, dtype=dtype), dim),
    "aten.linalg_vector_norm": _vector_norm, "aten.upsample_nearest2d": _nearest,
    "aten.copy": lambda x, source, non_blocking=False: jnp.broadcast_to(source, x.shape),
    "aten.searchsorted": _searchsorted, "aten.histc": _histc, "aten.linear": _linear, "aten.addmm": _addmm,
    "aten._softmax": _softmax, "aten._log_softmax": _log_softmax, "aten.scaled_dot_product_attention": attention,
    "aten.layer_norm": _layer_norm, "aten.native_layer_norm": _native_layer_norm, "aten.rms_norm": _rms_norm,
    "aten.native_group_norm": _group_norm, "aten._native_batch_norm_legit_functional": _batch_norm,
    "aten.convolution": _convolution, "aten.max_pool2d_with_indices": _max_pool, "aten.avg_pool2d": _avg_pool,
    "aten.avg_pool1d": _avg_pool, "aten.nll_loss_forward": _nll_loss, "aten._grouped_mm": _grouped_mm,
    "transformers.grouped_mm_fallback": _grouped_mm, "weft.document_attention": _document_attention,
    "weft_jax.stop_gradient": lax.stop_gradient, "weft_jax.attach": _attach,
    "weft_jax.experts_linear": lambda x, weights, ends: _grouped_mm(x, jnp.swapaxes(weights, 1, 2), ends),
}  # fmt: skip
