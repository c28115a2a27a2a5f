"""Optimizer states of pieces, joined to whole tensors that fit any plan, and cut again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weft.comm import all_gather, broadcast
from weft.errors import CheckpointError
from weft.mesh import Axis
from weft.parallel.zero.flat.buckets import Bucket, Slot
from weft.parallel.zero.flat.slot_adoption import SlotAdoption
from weft.parallel.zero.states import DTYPES, StateEntry, exchange, not_joinable, untrained


def gather_states(adoption: SlotAdoption, buckets: list[Bucket], shard: Axis) -> Iterator[tuple[str, torch.Tensor]]:
    """States of the buckets' parameters as (`parameter/key`, whole tensor). A collective over the shard axis."""
    if shard.size == 1:
        here = {slot for bucket in buckets for slot in bucket.slots}
        for slot, piece in adoption.pieces.items():
            if slot not in here:
                continue
            for key, value in adoption.optimizer.state.get(piece, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{slot.name}/{key}", value
        return
    adopted = {slot.name: slot for slot in adoption.slots}
    table = exchange(_describe(adoption, shard.rank), shard, buckets[0].weights.device)
    for bucket in buckets:
        mine = [slot for slot in bucket.slots if slot.name in adopted and slot.name in table]
        for key in sorted({key for slot in mine for key in table[slot.name]}):
            having = [slot for slot in mine if key in table[slot.name]]
            yield from _gather_key(adoption, bucket, having, key, table, shard)


def _gather_key(
    adoption: SlotAdoption,
    bucket: Bucket,
    slots: list[Slot],
    key: str,
    table: dict[str, dict[str, StateEntry]],
    shard: Axis,
) -> Iterator[tuple[str, torch.Tensor]]:
    """One key of one bucket's parameters: the divided ones in one collective, the others one by one."""
    divided = [slot for slot in slots if table[slot.name][key]["shape"] == "cut"]
    device = bucket.weights.device
    for dtype in sorted({table[slot.name][key]["dtype"] for slot in divided}):
        part = torch.zeros(bucket.length, dtype=DTYPES[dtype], device=device)
        alike = [slot for slot in divided if table[slot.name][key]["dtype"] == dtype]
        for slot in alike:
            target, value = slot.piece(part, bucket.own), _local(adoption, slot).get(key)
            if target is not None and value is not None:
                target.copy_(value)
        flat = all_gather(part, shard)
        yield from ((f"{slot.name}/{key}", slot.of(flat)) for slot in alike)
    for slot in slots:
        entry = table[slot.name][key]
        if entry["shape"] == "cut":
            continue
        if entry["value"] is not None:
            yield f"{slot.name}/{key}", torch.tensor(entry["value"], dtype=DTYPES[entry["dtype"]])
            continue
        whole = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=device)
        if entry["owner"] == shard.rank:
            whole.copy_(_local(adoption, slot)[key])
        yield f"{slot.name}/{key}", broadcast(whole, shard, entry["owner"])


def load_states(adoption: SlotAdoption, tensors: Mapping[str, torch.Tensor]) -> None:
    """Cut whole states to this rank's pieces. CheckpointError for a state that does not fit its parameter."""
    slots = {slot.name: slot for slot in adoption.slots}
    for full_name, saved in tensors.items():
        name, _, key = full_name.rpartition("/")
        slot = slots.get(name)
        if slot is None:
            raise untrained(full_name)
        piece = adoption.pieces.get(slot)
        if piece is None:
            continue
        assert slot.bucket is not None
        divided = piece.numel() < slot.numel
        if divided and saved.ndim and saved.shape != slot.shape:
            raise CheckpointError(
                f"optimizer state {full_name!r}: shape {tuple(saved.shape)} cannot be divided as the parameter is, "
                f"which has shape {tuple(slot.shape)}."
            )
        # Step counters stay where the optimizer wants them: fused kernels read them on the device.
        value = slot.cut(saved, slot.bucket.own) if divided and saved.ndim else saved
        target = torch.empty_like(piece) if value.shape == piece.shape and saved.ndim else torch.empty(value.shape)
        adoption.optimizer.state[piece][key] = target.to(dtype=saved.dtype, device=piece.device).copy_(value)


def _local(adoption: SlotAdoption, slot: Slot) -> dict[str, Any]:
    piece = adoption.pieces.get(slot)
    return adoption.optimizer.state.get(piece, {}) if piece is not None else {}


def _describe(adoption: SlotAdoption, rank: int) -> dict[str, dict[str, StateEntry]]:
    found: dict[str, dict[str, StateEntry]] = {}
    for slot, piece in adoption.pieces.items():
        divided = piece.numel() < slot.numel
        for key, value in adoption.optimizer.state.get(piece, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            shape: object = list(value.shape)
            if divided and value.ndim:
                if value.shape != piece.shape:
                    raise not_joinable(f"{slot.name}/{key}", value.shape)
                shape = "cut"
            number = value.item() if value.ndim == 0 and value.dtype != torch.bfloat16 else None
            found.setdefault(slot.name, {})[key] = {
                "owner": rank,
                "shape": shape,
                "dtype": str(value.dtype),
                "value": number,
            }
    return found
