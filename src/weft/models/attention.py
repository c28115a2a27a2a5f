"""Attention with rotary positions (Su et al. 2021, arXiv 2104.09864); pairs are formed from the two halves of a head.

B sequences, T tokens, N heads, C width of one head.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from weft.devices import access
from weft.models.kv_cache import LayerCache
from weft.models.private_torch import CPU_FLASH, CPU_FLASH_BACKWARD

#: Llama 3.1 was trained with this context before it was extended. It keeps frequencies with more than HIGH turns in it;
#: those with fewer than LOW turns are divided by rope_scale.
_TRAINED_LEN, _LOW, _HIGH = 8192, 1.0, 4.0


class Rotation(NamedTuple):
    """cos and sin of every token's angles. The first half of the sine is negated, as `rotate` expects."""

    cos_BT1C: Tensor
    sin_BT1C: Tensor


def rotation(positions_BT: Tensor, head_dim: int, theta: float, scale: float, dtype: torch.dtype) -> Rotation:
    """Return cos and sin for the positions, computed once per forward. Angles are float32, the result has `dtype`.

    Args:
        positions_BT: position of each token in its document.
        head_dim: width of a head; even.
        theta: base of the frequencies.
        scale: divisor of low frequencies, as in Llama 3.1; 1 leaves all unchanged.
        dtype: dtype of cosines and sines.
    """
    frequencies = _frequencies(head_dim, theta, scale, positions_BT.device)
    angles = positions_BT[:, :, None, None].to(torch.float32) * frequencies
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


def rotate(x_BTNC: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (x[i], x[i + C/2]) by its angle, in the rotation's dtype. The result has the dtype of x."""
    low, high = x_BTNC.chunk(2, -1)
    swapped_BTNC = torch.cat((high, low), -1)
    return torch.addcmul(x_BTNC * rotation.cos_BT1C, swapped_BTNC, rotation.sin_BT1C).to(x_BTNC.dtype)


def _frequencies(head_dim: int, theta: float, scale: float, device: torch.device) -> Tensor:
    """Return radians per position for each pair; (head_dim / 2,) in float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scale == 1:
        return frequencies
    turns = _TRAINED_LEN * frequencies / (2 * math.pi)
    keep = ((turns - _LOW) / (_HIGH - _LOW)).clamp(0, 1)
    return frequencies * keep + frequencies / scale * (1 - keep)


# Attention within the documents of packed sequences, or the images of a batch, without a mask over pairs of
# tokens.

#: Queries per chunk if torch has no kernel for packed documents.
_ROWS = 512


def find_starts(document_ids_BT: Tensor) -> Tensor | None:
    """Return the start positions of documents, int64 (B, M), computed from the id of each token.

    Rows with fewer documents are padded with T. Return None if ids decrease within a row, because an id may then appear
    again later, and all tokens with the same id attend to each other. Also return None on a GPU, for tensor subclasses
    and under torch.compile, because the host would have to wait for the result; the data loader then provides the
    starts.
    """
    plain = type(document_ids_BT) is Tensor and document_ids_BT.device.type == "cpu"
    if not plain or torch.compiler.is_compiling():
        return None
    steps_BT = document_ids_BT.diff(dim=1)
    if bool((steps_BT < 0).any()):
        return None
    num_tokens = document_ids_BT.shape[1]
    first_BT = F.pad(steps_BT != 0, (1, 0), value=True)
    most = int(first_BT.sum(1).max())
    places_BT = torch.arange(num_tokens).where(first_BT, num_tokens)
    return places_BT.sort(1).values[:, :most]


def document_attention(
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    starts_BM: Tensor | None,
    ids_BT: Tensor | None,
    window: int | None = None,
) -> Tensor:
    """Attend causally within each document; returns (B, H, T, C of the values).

    Args:
        q_BHTC: queries.
        k_BKTC: keys; K divides H.
        v_BKTC: values.
        starts_BM: start positions from `find_starts`, or None if unknown.
        ids_BT: document ids; tokens of one id form one document. If None, computed from starts_BM when needed.
        window: number of tokens that each token attends to, including itself; None: all.
    """
    given = (q_BHTC, k_BKTC, v_BKTC)
    if has_torch_function(given):
        return handle_torch_function(document_attention, given, *given, starts_BM, ids_BT, window)
    kind = q_BHTC.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q_BHTC, k_BKTC, v_BKTC = given = (q_BHTC.to(dtype), k_BKTC.to(dtype), v_BKTC.to(dtype))
    if starts_BM is not None and window is None and v_BKTC.shape[-1] == q_BHTC.shape[-1]:
        if kind == "cpu":
            return _one_by_one(*given, starts_BM, True)[0]
        half = q_BHTC.dtype in (torch.bfloat16, torch.float16)
        if access.has_cuda_kernels(q_BHTC.device) and half and q_BHTC.shape[-1] % 8 == 0 and q_BHTC.shape[-1] <= 256:
            return _by_lengths(*given, starts_BM, q_BHTC.shape[2], is_causal=True)
    if ids_BT is None:
        assert starts_BM is not None  # starts_BM or ids_BT is always set
        ids_BT = ids_of(starts_BM, q_BHTC.shape[2])
    return _by_rows(*given, ids_BT, is_causal=True, window=window)


def ids_of(starts_BM: Tensor, num_tokens: int) -> Tensor:
    """Return an id for each token, int64 (B, T), from the start positions of documents (B, M).

    If M is 0, each row is one document.
    """
    place_BT = torch.arange(num_tokens, device=starts_BM.device).expand(starts_BM.shape[0], -1).contiguous()
    return torch.searchsorted(starts_BM, place_BT, right=True) if starts_BM.shape[1] else torch.zeros_like(place_BT)


def bordered_attention(q_BHTC: Tensor, k_BHTC: Tensor, v_BHTC: Tensor, starts_BM: Tensor, longest: int) -> Tensor:
    """Attend without a causal mask within each image or clip; returns (B, H, T, C).

    Args:
        q_BHTC: queries.
        k_BHTC: keys.
        v_BHTC: values.
        starts_BM: start positions of images and clips, ascending from 0.
        longest: length of the longest image or clip.
    """
    given, kind = (q_BHTC, k_BHTC, v_BHTC), q_BHTC.device.type
    if kind == "cpu":
        return _one_by_one(*given, starts_BM, False)[0]
    half = q_BHTC.dtype in (torch.bfloat16, torch.float16)
    if access.has_cuda_kernels(q_BHTC.device) and half and q_BHTC.shape[-1] % 8 == 0 and q_BHTC.shape[-1] <= 256:
        return _by_lengths(*given, starts_BM, longest, is_causal=False)
    return _by_rows(*given, ids_of(starts_BM, q_BHTC.shape[2]), is_causal=False)


#: `weft.memory` recognizes attention by this attribute.
document_attention.is_attention = bordered_attention.is_attention = True


def _by_lengths(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, starts_BM: Tensor, longest: int, *, is_causal: bool
) -> Tensor:
    """Compute flash attention from cumulative lengths; empty documents cost a few idle blocks."""
    from torch.nn.attention.varlen import varlen_attn

    rows, num_tokens = q_BHTC.shape[0], q_BHTC.shape[2]
    row_B1 = torch.arange(rows, device=starts_BM.device)[:, None] * num_tokens
    end_1 = starts_BM.new_full((1,), rows * num_tokens)
    lengths = torch.cat([(starts_BM + row_B1).flatten(), end_1]).to(torch.int32)
    known = inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    how = how if is_causal else {}
    if k_BKTC.shape[1] != q_BHTC.shape[1]:
        if "enable_gqa" in known:
            how["enable_gqa"] = True
        else:
            times = q_BHTC.shape[1] // k_BKTC.shape[1]
            k_BKTC, v_BKTC = (x.repeat_interleave(times, 1) for x in (k_BKTC, v_BKTC))
    q_NHC, k_NKC, v_NKC = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTC, k_BKTC, v_BKTC))
    out_NHC = varlen_attn(q_NHC, k_NKC, v_NKC, lengths, lengths, longest, longest, **how)
    assert isinstance(out_NHC, Tensor)
    return out_NHC.unflatten(0, (rows, num_tokens)).transpose(1, 2)


def _by_rows(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, ids_BT: Tensor, *, is_causal: bool = True, window: int | None = None
) -> Tensor:
    """Compute attention in chunks of queries, each with a mask over the keys that any of its queries attends to."""
    times = q_BHTC.shape[1] // k_BKTC.shape[1]
    if times > 1:
        k_BKTC, v_BKTC = (x.repeat_interleave(times, 1) for x in (k_BKTC, v_BKTC))
    place_T, outs = torch.arange(q_BHTC.shape[2], device=q_BHTC.device), []
    for start in range(0, q_BHTC.shape[2], _ROWS):
        end = min(start + _ROWS, q_BHTC.shape[2])
        first, last = 0 if window is None else max(0, start - window + 1), end if is_causal else q_BHTC.shape[2]
        seen = ids_BT[:, start:end, None] == ids_BT[:, None, first:last]
        if is_causal:
            seen &= place_T[start:end, None] >= place_T[first:last]
        if window is not None:
            seen &= place_T[start:end, None] - place_T[first:last] < window
        outs.append(
            F.scaled_dot_product_attention(
                q_BHTC[:, :, start:end], k_BKTC[:, :, first:last], v_BKTC[:, :, first:last], attn_mask=seen[:, None]
            )
        )
    return torch.cat(outs, 2)


def _documents(starts_BM: Tensor, num_tokens: int) -> list[tuple[int, int, int, int]]:
    """Return (row, first token, tokens per document, count) of documents.

    Adjacent documents of equal length are one entry.
    """
    found = list[tuple[int, int, int, int]]()
    for row, starts in enumerate(starts_BM.tolist()):
        for first, end in zip(starts, [*starts[1:], num_tokens], strict=True):
            if end <= first:
                continue
            if found and found[-1][0] == row and found[-1][2] == end - first:
                found[-1] = (row, found[-1][1], end - first, found[-1][3] + 1)
            else:
                found.append((row, first, end - first, 1))
    return found


def _taken(x: Tensor, document: tuple[int, int, int, int]) -> Tensor:
    """Return a view of equally long documents as samples: (count, heads, tokens, ...) of (B, H, T, ...)."""
    row, first, length, number = document
    return x[row, :, first : first + length * number].unflatten(1, (number, length)).transpose(0, 1)


# One operator for torch.compile, which would otherwise compile a graph for each set of documents.
@torch.library.custom_op("weft::document_attention", mutates_args=())
def _one_by_one(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, starts_BM: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Compute attention document by document, and the log-sum-exp of scores, (B, H, T)."""
    batch, heads, num_tokens, _ = q_BHTC.shape
    out = torch.empty_like(q_BHTC.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    wide = torch.promote_types(q_BHTC.dtype, torch.float32)
    lse = q_BHTC.new_empty((batch, heads, num_tokens), dtype=wide)
    for one in _documents(starts_BM, num_tokens):
        found = CPU_FLASH(*(_taken(x, one) for x in (q_BHTC, k_BKTC, v_BKTC)), 0.0, is_causal)
        for whole, part in zip((out, lse), found, strict=True):
            _taken(whole, one).copy_(part)
    return out, lse


@_one_by_one.register_fake
def _(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, starts_BM: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_BHTC.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return out, q_BHTC.new_empty(q_BHTC.shape[:3], dtype=torch.promote_types(q_BHTC.dtype, torch.float32))


@torch.library.custom_op("weft::document_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, out: Tensor, lse: Tensor, starts_BM: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BHTC, k_BKTC, v_BKTC))
    for one in _documents(starts_BM, q_BHTC.shape[2]):
        given = (_taken(x, one) for x in (grad, q_BHTC, k_BKTC, v_BKTC, out, lse))
        for whole, found in zip(grads, CPU_FLASH_BACKWARD(*given, 0.0, is_causal), strict=True):
            _taken(whole, one).copy_(found)
    return grads[0], grads[1], grads[2]


@_backward.register_fake
def _(
    grad: Tensor, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, out: Tensor, lse: Tensor, starts_BM: Tensor,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BHTC, k_BKTC, v_BKTC))
    return q, k, v


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q_BHTC, k_BKTC, v_BKTC, starts_BM, ctx.is_causal = inputs
    ctx.save_for_backward(q_BHTC, k_BKTC, v_BKTC, *output, starts_BM)


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors, ctx.is_causal), None, None)


_one_by_one.register_autograd(_differentiate, setup_context=_keep)


@register_flop_formula(torch.ops.weft.document_attention)
def _flops(q: Any, k: Any, v: Any, starts: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Return the FLOPs as if each row were one document, since shapes do not contain document boundaries."""
    return sdpa_flop_count(q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))


# Causal attention with grouped key-value heads, and its masks.


class Visible(NamedTuple):
    """The keys that each query attends to, computed once per forward and passed to every block.

    Attributes:
        mask_B1TS: 0 if a query attends to a key and -inf otherwise. If None, the queries are the last T of the S
            tokens, and each attends to itself and all earlier tokens of its document.
        positions_BT, document_ids_BT: inputs of the model, for attention cores that need no dense mask.
        starts_BM: start positions of documents, for those cores; see `find_starts`. None if unknown.
    """

    mask_B1TS: Tensor | None
    positions_BT: Tensor
    document_ids_BT: Tensor | None
    starts_BM: Tensor | None = None


class SdpaCore(nn.Module):
    """softmax(q k^T / sqrt(C)) v by torch's fused kernels. Assign `attn.core` to use another core."""

    #: True if the core needs a dense mask for documents (the default for cores without this attribute). Otherwise it
    #: uses ids or starts.
    takes_mask = False

    def forward(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, visible: Visible) -> Tensor:
        """Compute attention; returns (B, H, T, C).

        Args:
            q_BHTC: queries.
            k_BKSC: keys; K divides H.
            v_BKSC: values.
            visible: keys that each query attends to.
        """
        if visible.mask_B1TS is None and visible.document_ids_BT is not None:
            return document_attention(q_BHTC, k_BKSC, v_BKSC, visible.starts_BM, visible.document_ids_BT)
        mask_B1TS, num_heads = visible.mask_B1TS, q_BHTC.shape[1]
        grouped = k_BKSC.shape[1] != num_heads
        if grouped and not takes_groups(q_BHTC.device.type, q_BHTC.dtype, mask_B1TS is not None):
            k_BKSC, v_BKSC = repeat_heads(k_BKSC, num_heads), repeat_heads(v_BKSC, num_heads)
            grouped = False
        # One new token attends to all keys, so it needs no mask; is_causal would restrict it to the first key.
        # This is a branch and not an expression: under compile a size may be symbolic, and torch requires a plain
        # bool.
        causal = True if mask_B1TS is None and q_BHTC.shape[2] > 1 else False  # noqa: SIM210
        return F.scaled_dot_product_attention(
            q_BHTC, k_BKSC, v_BKSC, attn_mask=mask_B1TS, is_causal=causal, enable_gqa=grouped
        )


def takes_groups(device_type: str, dtype: torch.dtype, has_mask: bool) -> bool:
    """Return True if scaled_dot_product_attention has a fused kernel for grouped-query attention (enable_gqa).

    On a GPU only the flash kernel supports it, without masks and not in float32. Otherwise torch silently uses the math
    kernel, which stores all (T, S) scores. If the key-value heads are repeated, torch uses a fused kernel.

    Args:
        device_type: type of the device, such as "cpu".
        dtype: dtype of queries, keys and values.
        has_mask: True if a mask is passed.
    """
    return device_type == "cpu" or (not has_mask and dtype in (torch.bfloat16, torch.float16))


def repeat_heads(x_BKSC: Tensor, num_heads: int) -> Tensor:
    """Repeat each key-value head for every query head of its group; (B, H, S, C)."""
    return x_BKSC.repeat_interleave(num_heads // x_BKSC.shape[1], 1)


class Attention(nn.Module):
    """q, k, v and o projections around a core without parameters.

    The number of heads follows from the projections' output widths, so sharded projections work too.

    Args:
        dim: width of the hidden state; a multiple of num_heads.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        bias: True if all projections have a bias.
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, *, bias: bool):
        super().__init__()
        self.head_dim = dim // num_heads
        kv_dim = num_kv_heads * self.head_dim
        self.q = nn.Linear(dim, dim, bias=bias)
        self.k = nn.Linear(dim, kv_dim, bias=bias)
        self.v = nn.Linear(dim, kv_dim, bias=bias)
        self.o = nn.Linear(dim, dim, bias=bias)
        self.core = SdpaCore()

    def forward(
        self, x_BTD: Tensor, visible: Visible, rotation: Rotation | None, cache: LayerCache | None = None
    ) -> Tensor:
        """Attend; (B, T, D) to (B, T, D).

        Args:
            x_BTD: hidden states.
            visible: keys that each query attends to.
            rotation: None for models with learned positions.
            cache: keys and values of earlier tokens; the new ones are appended.
        """
        heads = (*x_BTD.shape[:2], -1, self.head_dim)
        q_BTHC = self.q(x_BTD).view(heads)
        k_BTKC = self.k(x_BTD).view(heads)
        v_BTKC = self.v(x_BTD).view(heads)
        if rotation is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, rotation), rotate(k_BTKC, rotation)
        k_BKSC, v_BKSC = k_BTKC.transpose(1, 2), v_BTKC.transpose(1, 2)
        if cache is not None:
            k_BKSC, v_BKSC = cache.append(k_BKSC, v_BKSC)
        out_BHTC = self.core(q_BTHC.transpose(1, 2), k_BKSC, v_BKSC, visible)
        return self.o(out_BHTC.transpose(1, 2).flatten(2))


def see_causally(
    positions_BT: Tensor, document_ids_BT: Tensor | None, num_seen: int, dtype: torch.dtype, *,
    starts_BM: Tensor | None = None, wants_mask: bool = False,
) -> Visible:  # fmt: skip
    """Return the keys that each query attends to, computed once per forward.

    Args:
        positions_BT: position of each token in its document.
        document_ids_BT: tokens attend only to tokens of the same id; None: the full sequence is one document.
        num_seen: number of tokens in the cache; they precede all tokens here.
        dtype: dtype of the mask if one is needed: the dtype of the attention computation.
        starts_BM: start positions of documents; None: computed from the ids.
        wants_mask: True to build a dense mask for documents.
    """
    num_new = positions_BT.shape[1]
    if document_ids_BT is None and (num_seen == 0 or num_new == 1):
        return Visible(None, positions_BT, None)
    if document_ids_BT is not None and not wants_mask:
        return Visible(
            None, positions_BT, document_ids_BT, find_starts(document_ids_BT) if starts_BM is None else starts_BM
        )
    device = positions_BT.device
    order_S = torch.arange(num_seen + num_new, device=device)
    seen_TS = order_S[num_seen:, None] >= order_S[None, :]
    if document_ids_BT is None:
        seen_B1TS = seen_TS[None, None]
    else:
        seen_B1TS = (seen_TS & (document_ids_BT[:, :, None] == document_ids_BT[:, None, :]))[:, None]
    mask_B1TS = torch.zeros(seen_B1TS.shape, dtype=dtype, device=device).masked_fill_(~seen_B1TS, -torch.inf)
    return Visible(mask_B1TS, positions_BT, document_ids_BT)


def hide_padding(visible: Visible, starts_B: Tensor, num_seen: int, dtype: torch.dtype) -> Visible:
    """Hide the columns before each row's first token from the new tokens of a batch with a cache.

    Args:
        visible: what the new tokens attend to without padding.
        starts_B: column of each row's first token; the new tokens come after it.
        num_seen: number of columns in the cache.
        dtype: dtype of the mask.
    """
    num_new, device = visible.positions_BT.shape[1], visible.positions_BT.device
    columns_S = torch.arange(num_seen + num_new, device=device)
    hidden_B11S = columns_S < starts_B.to(device)[:, None, None, None]
    mask = visible.mask_B1TS
    if mask is None:
        mask = torch.zeros(len(starts_B), 1, num_new, num_seen + num_new, dtype=dtype, device=device)
    return visible._replace(mask_B1TS=mask.expand(len(starts_B), -1, -1, -1).masked_fill(hidden_B11S, -torch.inf))
