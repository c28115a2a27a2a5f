"""Context-parallel attention modes (gather, ring, ulysses), and document boundaries of packed sequences.

B sequences, T tokens of this rank, S tokens of the full sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.comm.autograd import exchange_dims
from weft.comm.collectives import all_gather, reduce_scatter
from weft.comm.mesh import Axis
from weft.comm.peer import start_shift
from weft.config.partitioning import chunks_of, num_chunks
from weft.data.batches import host_values, map_tensors, parts_of, remember_host, with_parts
from weft.errors import ModelError
from weft.models.attention import repeat_heads, takes_groups
from weft.parallel.context.kernels import (
    CAUSAL,
    AttentionBlock,
    AttentionWindow,
    Borders,
    Gradients,
    PartialAttention,
    Scoring,
    attention_blocks,
    sink_gradient,
    sum_dtype,
)
from weft.private_torch import version_of, without_modes

_WHOLE = "_weft_whole_values"


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """Which tokens of a sequence one rank holds, and in which order. `mode` is "gather", "ring" or "ulysses"."""

    mode: str
    cp: int
    rank: int
    seq_len: int

    @property
    def chunk_len(self) -> int:
        return self.seq_len // num_chunks(self.mode, self.cp)

    def chunks(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the chunk indices of a rank (default: this one), in sequence order."""
        return chunks_of(self.mode, self.cp, self.rank if rank is None else rank)

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return the position in the sequence of each of this rank's tokens, (T,)."""
        length = self.chunk_len
        parts = [torch.arange(chunk * length, (chunk + 1) * length, device=device) for chunk in self.chunks()]
        return torch.cat(parts)

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor whose dim 1 is the sequence."""
        length = self.chunk_len
        parts = [x.narrow(1, chunk * length, length) for chunk in self.chunks()]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the full sequence from all ranks' shards in axis order. Dim 1 is the sequence."""
        found: dict[int, torch.Tensor] = {}
        for rank, part in enumerate(parts):
            chunks = self.chunks(rank)
            found.update(zip(chunks, part.chunk(len(chunks), 1), strict=True))
        return torch.cat([found[chunk] for chunk in sorted(found)], 1)


def sequence_length(batch: Any) -> int | None:
    """Return the tokens per sequence of a batch, or None.

    It is dim 1 of the batch's input_ids or inputs_embeds, or else of its first tensor with at least two dims.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[1] if batch.ndim >= 2 else None
    parts = parts_of(batch) or []
    if isinstance(batch, Mapping):
        parts = [batch[name] for name in ("input_ids", "inputs_embeds") if name in batch] + parts
    return next((length for part in parts if (length := sequence_length(part)) is not None), None)


def shard_batch(batch: Any, order: SequenceOrder) -> Any:
    """Return the batch with only this rank's tokens in every tensor whose dim 1 is the sequence.

    Raises ModelError if a tensor may be a mask over pairs of tokens, which has the sequence in two dims.
    """
    if isinstance(batch, Mapping):
        parts = [
            map_tensors(functools.partial(shard_tensor, order=order, name=str(name)), batch[name]) for name in batch
        ]
        return with_parts(batch, parts)
    return map_tensors(lambda tensor: shard_tensor(tensor, order), batch)


def shard_tensor(tensor: torch.Tensor, order: SequenceOrder, name: str = "") -> torch.Tensor:
    """Return this rank's tokens if dim 1 is the sequence, else the tensor.

    If the host knows the tensor's integers, `full_values` returns them for the result. Raises ModelError if a tensor
    with at least 3 dims has the sequence in the last two. name: the tensor's name in the batch, for this error.
    """
    if tensor.ndim >= 3 and list(tensor.shape[-2:]) == [order.seq_len] * 2:
        shape = tuple(tensor.shape)
        if name and "mask" not in name and "bias" not in name:
            raise ModelError(
                f"cp={order.cp}: the last two dims of {name} {shape} both equal the sequence length {order.seq_len}, "
                "so it may be an image or a mask over pairs of tokens. Use cp=1, or another length."
            )
        raise ModelError(
            f"cp={order.cp}: the batch holds a mask of shape {shape} over pairs of tokens, which cannot be sharded "
            "along the sequence. Use document_ids, or an attention_mask of shape (batch, sequence)."
        )
    if tensor.ndim < 2 or tensor.shape[1] != order.seq_len:
        return tensor
    part = order.shard(tensor)
    values = None if tensor.is_floating_point() else host_values(tensor)
    if values is not None:
        remember_full(part, values)
        if values is not tensor:
            remember_host(part, order.shard(values))
    return part


def remember_full(part: torch.Tensor, values: torch.Tensor | None) -> None:
    """Add the full sequences' values, (B, S) on the host, as an attribute of this rank's shard of them.

    Does nothing if `values` is None, or if `part` is an inference tensor, which has no version counter.
    """
    if values is not None and not part.is_inference():
        setattr(part, _WHOLE, (values, version_of(part)))


def full_values(part: torch.Tensor) -> torch.Tensor | None:
    """Return the values that `remember_full` recorded, or None if the tensor has no record or was modified since."""
    values, version = getattr(part, _WHOLE, (None, 0))
    return values if values is None or version_of(part) == version else None


# Attention over sharded sequences.


#: Id of padding. Padding tokens attend only to each other, and no trained token attends to them.
PADDING = -1


def full_sequence(x_BT: torch.Tensor, axis: Axis, order: SequenceOrder) -> torch.Tensor:
    """Return the full sequence of all ranks' tokens in order, (B, S). Collective over the axis."""
    x_BT = x_BT.contiguous()
    parts = all_gather(x_BT, axis, out=x_BT.new_empty((axis.size, *x_BT.shape)))
    return order.join(list(parts.unbind(0)))


def find_borders(ids_BT: torch.Tensor, axis: Axis, order: SequenceOrder) -> tuple[Borders, ...] | None:
    """Return the document boundaries in full sequences, from the ids of each rank's tokens. All ranks get the same.

    Returns None if each sequence is one document. Uses host values if the batch came from the host. For ids computed on
    the device, this is a collective over the axis, and the host waits for it. Raises ModelError if a document continues
    after another one.
    """
    known = full_values(ids_BT)
    ids_BS = (full_sequence(ids_BT.flatten(1), axis, order).cpu() if known is None else known).numpy()
    changes = np.diff(ids_BS, axis=1)
    if not changes.any():
        return None
    if (changes < 0).any():
        for row in ids_BS:
            _check_row(row)
    return tuple((0, *(np.flatnonzero(change) + 1).tolist(), order.seq_len) for change in changes)


def _check_row(row: np.ndarray) -> None:
    """Raise ModelError unless each document is contiguous. Padding may be in several ranges."""
    starts = row[np.flatnonzero(np.diff(row, prepend=row[0] - 1))]
    real = starts[starts != PADDING]
    if len(np.unique(real)) != len(real):
        ids, counts = np.unique(real, return_counts=True)
        raise ModelError(
            f"document_ids: document {ids[counts > 1][0]} continues after another one has begun, and a sharded "
            "sequence needs contiguous documents. Use another id for each part."
        )


# The three modes in which queries of a rank attend to the keys of the full sequence.


@dataclass(slots=True)
class View:
    """Which keys this rank's tokens attend to.

    borders: document boundaries of each sequence, or None if each sequence is one document.
    """

    axis: Axis
    order: SequenceOrder
    borders: tuple[Borders, ...] | None = None
    _pieces: dict[tuple[int | None, AttentionWindow], list[AttentionBlock]] = field(default_factory=dict)
    _places: dict[int, Tensor] = field(default_factory=dict)

    def blocks_of(self, source: int, sight: AttentionWindow) -> list[AttentionBlock]:
        """Return the attention blocks for this rank's queries and the keys of rank `source`. Cached for all layers."""
        if (source, sight) not in self._pieces:
            mine, theirs, length = self.order.chunks(), self.order.chunks(source), self.order.chunk_len
            self._pieces[source, sight] = attention_blocks(mine, theirs, length, self.borders, sight)
        return self._pieces[source, sight]

    def positions(self, source: int, device: torch.device) -> Tensor:
        if source not in self._places:
            self._places[source] = replace(self.order, rank=source).positions(device)
        return self._places[source]

    def full_blocks(self, sight: AttentionWindow) -> list[AttentionBlock]:
        if (None, sight) not in self._pieces:
            self._pieces[None, sight] = attention_blocks((0,), (0,), self.order.seq_len, self.borders, sight)
        return self._pieces[None, sight]


def attend_sharded(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scoring: Scoring, view: View, sink_H: Tensor | None = None
) -> Tensor:
    """Return attention over the full sequence for this rank's queries, (B, H, T, C).

    Values may have another head dim than queries and keys (multi-head latent attention); the output has the values'
    head dim. The narrower tensors are padded with zeros, which change no result, so that keys and values are one
    message. sink_H: attention sink of each head (GPT-OSS).
    """
    width = v_BKTC.shape[-1]
    widest = max(width, q_BHTC.shape[-1])
    q_BHTC, k_BKTC, v_BKTC = (_padded(x, widest) for x in (q_BHTC, k_BKTC, v_BKTC))
    if view.order.mode == "ulysses":
        out_BHTC = _ulysses(q_BHTC, k_BKTC, v_BKTC, scoring, view, sink_H)
    else:
        function = _Gather if view.order.mode == "gather" else _Ring
        out_BHTC = function.apply(q_BHTC, k_BKTC, v_BKTC, sink_H, scoring, view)
    return out_BHTC if width == widest else out_BHTC[..., :width]


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, sink_H: Tensor | None, scoring: Scoring, view: View
    ) -> Tensor:
        with without_modes():
            kv_2BKTC = torch.stack((k_BKTC, v_BKTC))
            seen = PartialAttention(q_BHTC, scoring, view.positions(view.axis.rank, q_BHTC.device))
            for source, kv in enumerate(_gathered(kv_2BKTC, view.axis)):
                seen.add(kv, view.blocks_of(source, scoring.sight), view.positions(source, q_BHTC.device))
            out_BHTC, lse_BHT = seen.result(sink_H)
        ctx.save_for_backward(q_BHTC, kv_2BKTC, out_BHTC, lse_BHT, sink_H)
        ctx.scoring, ctx.view = scoring, view
        return out_BHTC

    @staticmethod
    def backward(ctx: Any, grad_BHTC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        q_BHTC, kv_2BKTC, out_BHTC, lse_BHT, sink_H = ctx.saved_tensors
        view, axis, dtype, device = ctx.view, ctx.view.axis, sum_dtype(q_BHTC.dtype), q_BHTC.device
        all_kv = _gathered(kv_2BKTC, axis)
        all_grads = torch.zeros_like(all_kv, dtype=dtype)
        grads = Gradients(grad_BHTC, q_BHTC, out_BHTC, lse_BHT, ctx.scoring, view.positions(axis.rank, device))
        for source, kv in enumerate(all_kv):
            grads.add(kv, view.blocks_of(source, ctx.scoring.sight), view.positions(source, device), all_grads[source])
        own = reduce_scatter(all_grads, axis, out=torch.empty_like(kv_2BKTC, dtype=dtype))
        return *_returned(grads, own, q_BHTC), sink_gradient(grad_BHTC, out_BHTC, lse_BHT, sink_H), None, None


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, sink_H: Tensor | None, scoring: Scoring, view: View
    ) -> Tensor:
        with without_modes():
            kv_2BKTC = kv = torch.stack((k_BKTC, v_BKTC))
            axis, device = view.axis, q_BHTC.device
            seen = PartialAttention(q_BHTC, scoring, view.positions(axis.rank, device))
            for step in range(axis.size):
                coming = start_shift(kv, axis) if step + 1 < axis.size else None
                source = (axis.rank - step) % axis.size
                seen.add(kv, view.blocks_of(source, scoring.sight), view.positions(source, device))
                kv = coming.wait() if coming else kv
            out_BHTC, lse_BHT = seen.result(sink_H)
        ctx.save_for_backward(q_BHTC, kv_2BKTC, out_BHTC, lse_BHT, sink_H)
        ctx.scoring, ctx.view = scoring, view
        return out_BHTC

    @staticmethod
    def backward(ctx: Any, grad_BHTC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        q_BHTC, kv_2BKTC, out_BHTC, lse_BHT, sink_H = ctx.saved_tensors
        view, axis, dtype, device = ctx.view, ctx.view.axis, sum_dtype(q_BHTC.dtype), q_BHTC.device
        grads = Gradients(grad_BHTC, q_BHTC, out_BHTC, lse_BHT, ctx.scoring, view.positions(axis.rank, device))
        own = torch.zeros_like(kv_2BKTC, dtype=dtype)
        kv, grad_coming = kv_2BKTC, None
        for step in range(axis.size):
            coming = start_shift(kv, axis) if step + 1 < axis.size else None
            part, source = own if step == 0 else torch.zeros_like(own), (axis.rank - step) % axis.size
            grads.add(kv, view.blocks_of(source, ctx.scoring.sight), view.positions(source, device), part)
            if step:
                # The gradient of these keys from the ranks that had them before arrives one step after the keys.
                part = part if grad_coming is None else part.add_(grad_coming.wait())
                grad_coming = start_shift(part, axis)
            kv = coming.wait() if coming else kv
        if grad_coming is not None:
            own.add_(grad_coming.wait())
        return *_returned(grads, own, q_BHTC), sink_gradient(grad_BHTC, out_BHTC, lse_BHT, sink_H), None, None


class _FullAttention(torch.autograd.Function):
    """Attention over full sequences on one rank, for scores that a single fused kernel does not compute."""

    @staticmethod
    def forward(
        ctx: Any, q_BHSC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, sink_H: Tensor | None, scoring: Scoring,
        found: list[AttentionBlock],
    ) -> Tensor:  # fmt: skip
        with without_modes():
            places_S = torch.arange(q_BHSC.shape[2], device=q_BHSC.device)
            seen = PartialAttention(q_BHSC, scoring, places_S)
            seen.add((k_BKSC, v_BKSC), found, places_S)
            out_BHSC, lse_BHS = seen.result(sink_H)
        ctx.save_for_backward(q_BHSC, k_BKSC, v_BKSC, out_BHSC, lse_BHS, sink_H)
        ctx.scoring, ctx.found = scoring, found
        return out_BHSC

    @staticmethod
    def backward(ctx: Any, grad_BHSC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        q_BHSC, k_BKSC, v_BKSC, out_BHSC, lse_BHS, sink_H = ctx.saved_tensors
        places_S = torch.arange(q_BHSC.shape[2], device=q_BHSC.device)
        grads = Gradients(grad_BHSC, q_BHSC, out_BHSC, lse_BHS, ctx.scoring, places_S)
        own = k_BKSC.new_zeros((2, *k_BKSC.shape), dtype=sum_dtype(q_BHSC.dtype))
        grads.add((k_BKSC, v_BKSC), ctx.found, places_S, own)
        return *_returned(grads, own, q_BHSC), sink_gradient(grad_BHSC, out_BHSC, lse_BHS, sink_H), None, None


def _ulysses(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, scoring: Scoring, view: View, sink_H: Tensor | None
) -> Tensor:
    axis = view.axis
    if k_BKTC.shape[1] % axis.size:
        # Fewer heads than ranks: each head is sent to all ranks that hold queries of its group.
        times = axis.size // k_BKTC.shape[1]
        k_BKTC, v_BKTC = k_BKTC.repeat_interleave(times, 1), v_BKTC.repeat_interleave(times, 1)
    # One message for queries, keys and values, grouped by destination rank.
    shares = [x.unflatten(1, (axis.size, -1)) for x in (q_BHTC, k_BKTC, v_BKTC)]
    sizes = [share.shape[2] for share in shares]
    swapped = exchange_dims(torch.cat(shares, 2), axis, 1, 3).squeeze(1)
    q_BHSC, k_BKSC, v_BKSC = swapped.split(sizes, 1)
    if view.borders is None and scoring.is_usual and sink_H is None:
        grouped = k_BKSC.shape[1] != q_BHSC.shape[1]
        if grouped and not takes_groups(q_BHSC.device.type, q_BHSC.dtype, has_mask=False):
            k_BKSC, v_BKSC = (repeat_heads(x, q_BHSC.shape[1]) for x in (k_BKSC, v_BKSC))
            grouped = False
        out_BHSC = F.scaled_dot_product_attention(
            q_BHSC, k_BKSC, v_BKSC, is_causal=scoring.sight == CAUSAL, scale=scoring.scale, enable_gqa=grouped
        )
    else:
        if scoring.drop is not None:
            first = scoring.drop.first_head + axis.rank * q_BHSC.shape[1]
            scoring = replace(scoring, drop=replace(scoring.drop, first_head=first))
        if sink_H is not None:  # of this rank's heads
            sink_H = sink_H.unflatten(0, (axis.size, -1))[axis.rank]
        out_BHSC = _FullAttention.apply(q_BHSC, k_BKSC, v_BKSC, sink_H, scoring, view.full_blocks(scoring.sight))
    return exchange_dims(out_BHSC, axis, 2, 1)


def _gathered(kv_2BKTC: Tensor, axis: Axis) -> Tensor:
    """Return keys and values of all ranks in axis order, (size, 2, B, K, T, C)."""
    return all_gather(kv_2BKTC, axis, out=kv_2BKTC.new_empty((axis.size, *kv_2BKTC.shape)))


def _returned(grads: Gradients, own: Tensor, q_BHTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_kv = own.to(q_BHTC.dtype)
    return grads.q_BHTC.to(q_BHTC.dtype), grad_kv[0], grad_kv[1]
