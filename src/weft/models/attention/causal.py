"""Causal attention with grouped key-value heads, and what of a sequence each token may see.

B sequences, T query tokens, S key tokens (S = T without a cache), D model width, H query heads, K key-value heads,
C width of one head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.attention.by_documents import document_attention, find_starts
from weft.models.attention.cache import LayerCache
from weft.models.attention.rotary import Rotation, rotate


class Visible(NamedTuple):
    """What each query may see, made once per forward and passed to every block.

    mask_B1TS: 0 where a query sees a key and -inf elsewhere; None: the queries are the last T of the S tokens, each
    sees itself and all before it.
    positions_BT, document_ids_BT: as the model got them, for cores that need no dense mask.
    starts_BM: where documents begin, for those cores; see `by_documents.py`. None: not known.
    """

    mask_B1TS: Tensor | None
    positions_BT: Tensor
    document_ids_BT: Tensor | None
    starts_BM: Tensor | None = None


class SdpaCore(nn.Module):
    """softmax(q k^T / sqrt(C)) v by torch's fused kernels. Another core may take its place: `attn.core = ...`."""

    #: Whether it wants a mask of documents, as a core does that says nothing; else their ids or starts must do.
    takes_mask = False

    def forward(self, q_BHTC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, visible: Visible) -> Tensor:
        """Mix the values; (B, H, T, C).

        Args:
            q_BHTC: queries.
            k_BKSC: keys; K divides H.
            v_BKSC: values.
            visible: what each token sees.
        """
        if visible.mask_B1TS is None and visible.document_ids_BT is not None:
            return document_attention(q_BHTC, k_BKSC, v_BKSC, visible.starts_BM, visible.document_ids_BT)
        mask_B1TS, num_heads = visible.mask_B1TS, q_BHTC.shape[1]
        grouped = k_BKSC.shape[1] != num_heads
        if grouped and not takes_groups(q_BHTC.device.type, q_BHTC.dtype, mask_B1TS is not None):
            k_BKSC, v_BKSC = repeat_heads(k_BKSC, num_heads), repeat_heads(v_BKSC, num_heads)
            grouped = False
        # One new token sees all keys, so it needs no mask; is_causal would let it see the first key only.
        # Branched, not computed: under compile a size may be symbolic, and torch wants a plain bool.
        causal = True if mask_B1TS is None and q_BHTC.shape[2] > 1 else False  # noqa: SIM210
        return F.scaled_dot_product_attention(
            q_BHTC, k_BKSC, v_BKSC, attn_mask=mask_B1TS, is_causal=causal, enable_gqa=grouped
        )


def takes_groups(device_type: str, dtype: torch.dtype, has_mask: bool) -> bool:
    """Return whether torch has a fused kernel here for fewer key-value heads than query heads.

    On a GPU only the flash kernel has it, and that takes neither masks nor float32; torch would go to plain
    matrix products, which hold all (T, S) scores in memory, without a word. Repeated heads find a fused kernel.

    Args:
        device_type: "cpu" or "cuda".
        dtype: of queries, keys and values.
        has_mask: whether a mask is given.
    """
    return device_type == "cpu" or (not has_mask and dtype in (torch.bfloat16, torch.float16))


def repeat_heads(x_BKSC: Tensor, num_heads: int) -> Tensor:
    """Repeat each key-value head for every query head of its group; (B, H, S, C)."""
    return x_BKSC.repeat_interleave(num_heads // x_BKSC.shape[1], 1)


class Attention(nn.Module):
    """q, k, v and o projections around a core without parameters.

    The number of heads is read from the projections' outputs, so a projection that holds some of the heads works too.

    Args:
        dim: width of the hidden state; num_heads divides it.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        bias: of all projections.
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
            visible: what each token sees.
            rotation: None for models with learned positions.
            cache: keys and values of earlier tokens; it takes up those of this call.
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
    """Decide once per forward what each token sees.

    Args:
        positions_BT: place of each token in its document.
        document_ids_BT: tokens see only tokens of the same id; None: the whole sequence is one document.
        num_seen: tokens that a cache already holds; they come before all tokens here.
        dtype: of the mask, where one is needed: the dtype in which attention runs.
        starts_BM: where documents begin; found from the ids where it is None.
        wants_mask: make a mask over pairs of tokens for documents.
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
