"""Assignment of a sequence's tokens to ranks, and sharding of batches by it.

B sequences, S tokens of a full sequence, T tokens of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.config.partitioning import chunks_of, num_chunks
from weft.data.batches import host_values, map_tensors, parts_of, remember_host, with_parts
from weft.errors import ModelError
from weft.private_torch import version_of

_WHOLE = "_weft_whole_values"


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """Positions of one rank's tokens in the sequence. `mode` is "gather", "ring" or "ulysses"."""

    mode: str
    cp: int
    rank: int
    seq_len: int

    @property
    def chunk_len(self) -> int:
        return self.seq_len // num_chunks(self.mode, self.cp)

    def chunks(self, rank: int | None = None) -> tuple[int, ...]:
        """Return the chunk numbers of a rank (default: this one), in sequence order."""
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
    """Return the tokens per sequence of a batch, or None. This is dim 1 of its input_ids, or else of its first tensor
    with two dims.
    """
    if isinstance(batch, torch.Tensor):
        return batch.shape[1] if batch.ndim >= 2 else None
    parts = parts_of(batch) or []
    if isinstance(batch, Mapping):
        parts = [batch[name] for name in ("input_ids", "inputs_embeds") if name in batch] + parts
    return next((length for part in parts if (length := sequence_length(part)) is not None), None)


def shard_batch(batch: Any, order: SequenceOrder) -> Any:
    """Return the batch with every tensor whose dim 1 is the sequence reduced to this rank's tokens. Raises ModelError
    if a tensor is a mask over pairs of tokens, which has the sequence in two dims.
    """
    if isinstance(batch, Mapping):
        parts = [
            map_tensors(functools.partial(shard_tensor, order=order, name=str(name)), batch[name]) for name in batch
        ]
        return with_parts(batch, parts)
    return map_tensors(lambda tensor: shard_tensor(tensor, order), batch)


def shard_tensor(tensor: torch.Tensor, order: SequenceOrder, name: str = "") -> torch.Tensor:
    """Return this rank's tokens if dim 1 is the sequence, else the tensor. `name` is the tensor's name in the batch,
    for errors. Raises ModelError if the last two dims are both the sequence.
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
    """Record the host values of full sequences, (B, S), for a tensor that is this rank's shard of them."""
    if values is not None and not part.is_inference():
        setattr(part, _WHOLE, (values, version_of(part)))


def full_values(part: torch.Tensor) -> torch.Tensor | None:
    """Return the values that `remember_full` recorded, or None if the tensor has no record or was modified since."""
    values, version = getattr(part, _WHOLE, (None, 0))
    return values if values is None or version_of(part) == version else None
