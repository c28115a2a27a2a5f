"""Attention within the documents of packed sequences, or the pictures of a batch, without a mask over pairs of tokens.

Documents travel as the place where each begins, M of them a row; rows with fewer are filled up with T, and such empty
documents hold nothing. So all shapes are known before the values are, and no device is asked for them.

B sequences, T tokens, M places, H query heads, K key-value heads, C width of one head, N = B T.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.flop_counter import register_flop_formula, sdpa_flop_count

from weft.models.private_torch import CPU_FLASH, CPU_FLASH_BACKWARD

#: Queries at a time where torch has no kernel that knows documents.
_ROWS = 512


def find_starts(document_ids_BT: Tensor) -> Tensor | None:
    """Return where documents begin, int64 (B, M), from an id for each token, on a CPU.

    None where ids come again after others, as tokens of one id see each other wherever they are; and on a device, where
    the host would have to wait for the answer: there the loader's places save memory and time.
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
    """Mix the values of each token with those before it in its document; (B, H, T, C of the values).

    Args:
        q_BHTC: queries.
        k_BKTC: keys; K divides H.
        v_BKTC: values.
        starts_BM: as of `find_starts`; None: not known.
        ids_BT: of documents; tokens of one id are one document. None: found from starts_BM where they are needed.
        window: a token sees so many at most, itself among them; None: all.
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
        if kind == "cuda" and half and q_BHTC.shape[-1] % 8 == 0 and q_BHTC.shape[-1] <= 256:
            return _by_lengths(*given, starts_BM, q_BHTC.shape[2], is_causal=True)
    if ids_BT is None:
        assert starts_BM is not None  # one of them says where documents are
        ids_BT = ids_of(starts_BM, q_BHTC.shape[2])
    return _by_rows(*given, ids_BT, is_causal=True, window=window)


def ids_of(starts_BM: Tensor, num_tokens: int) -> Tensor:
    """Return an id for each token, int64 (B, T), from where documents begin; (B, 0): all are one document."""
    place_BT = torch.arange(num_tokens, device=starts_BM.device).expand(starts_BM.shape[0], -1).contiguous()
    return torch.searchsorted(starts_BM, place_BT, right=True) if starts_BM.shape[1] else torch.zeros_like(place_BT)


def bordered_attention(q_BHTC: Tensor, k_BHTC: Tensor, v_BHTC: Tensor, starts_BM: Tensor, longest: int) -> Tensor:
    """Mix the values of rows with those of all rows of their picture or clip; (B, H, T, C).

    Args:
        q_BHTC: queries.
        k_BHTC: keys.
        v_BHTC: values.
        starts_BM: where pictures and clips begin, ascending from 0.
        longest: rows of the longest.
    """
    given, kind = (q_BHTC, k_BHTC, v_BHTC), q_BHTC.device.type
    if kind == "cpu":
        return _one_by_one(*given, starts_BM, False)[0]
    half = q_BHTC.dtype in (torch.bfloat16, torch.float16)
    if kind == "cuda" and half and q_BHTC.shape[-1] % 8 == 0 and q_BHTC.shape[-1] <= 256:
        return _by_lengths(*given, starts_BM, longest, is_causal=False)
    return _by_rows(*given, ids_of(starts_BM, q_BHTC.shape[2]), is_causal=False)


#: What `weft.memory` looks for.
document_attention.is_attention = bordered_attention.is_attention = True


def _by_lengths(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, starts_BM: Tensor, longest: int, *, is_causal: bool
) -> Tensor:
    """Flash attention by cumulative lengths; empty documents cost a few idle blocks."""
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
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    ids_BT: Tensor,
    *,
    is_causal: bool = True,
    window: int | None = None,
) -> Tensor:
    """Some queries at a time, with a mask for those over the keys that one of them may see."""
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
    """(row, first token, tokens of each, number) of documents; neighbours of one length are one entry."""
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
    """A view of documents of one length as samples: (number, heads, tokens, ...) of (B, H, T, ...)."""
    row, first, length, number = document
    return x[row, :, first : first + length * number].unflatten(1, (number, length)).transpose(0, 1)


# One operator for torch.compile, which would else make a graph for each set of documents.
@torch.library.custom_op("weft::document_attention", mutates_args=())
def _one_by_one(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, starts_BM: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Document by document; also the log-sum-exp of scores, (B, H, T)."""
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
    """As if each row were one document: what shapes alone tell."""
    return sdpa_flop_count(q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))
