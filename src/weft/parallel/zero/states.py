"""Optimizer states of pieces, joined to whole tensors that fit any plan, and cut again.

Ranks do not know what states the pieces of others have, so they first exchange a table of them: per parameter and
key the shape and format, and the value itself where it is a single number (step counters).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from weft.comm import all_gather, all_reduce, broadcast
from weft.errors import CheckpointError
from weft.mesh import Axis
from weft.parallel.zero.adopt import Adoption
from weft.parallel.zero.flat.buckets import Bucket, Slot

#: One state of one parameter: owner on the shard axis, shape ("cut" where it is divided as the parameter is), format,
#: and the value of a single number.
_Entry = dict[str, Any]
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def gather_states(adoption: Adoption, buckets: list[Bucket], shard: Axis) -> Iterator[tuple[str, torch.Tensor]]:
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
    adoption: Adoption, bucket: Bucket, slots: list[Slot], key: str, table: dict[str, dict[str, _Entry]], shard: Axis
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


def load_states(adoption: Adoption, tensors: Mapping[str, torch.Tensor]) -> None:
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


def untrained(full_name: str) -> CheckpointError:
    """What is said of a saved state, such as "head.weight/exp_avg", whose parameter the optimizer does not have."""
    return CheckpointError(
        f"optimizer state {full_name!r}: this optimizer does not train that parameter. "
        f"Resume with the optimizer and the frozen parameters of the run that saved it."
    )


def _local(adoption: Adoption, slot: Slot) -> dict[str, Any]:
    piece = adoption.pieces.get(slot)
    return adoption.optimizer.state.get(piece, {}) if piece is not None else {}


def _describe(adoption: Adoption, rank: int) -> dict[str, dict[str, _Entry]]:
    found: dict[str, dict[str, _Entry]] = {}
    for slot, piece in adoption.pieces.items():
        divided = piece.numel() < slot.numel
        for key, value in adoption.optimizer.state.get(piece, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            shape: object = list(value.shape)
            if divided and value.ndim:
                if value.shape != piece.shape:
                    raise CheckpointError(
                        f"optimizer state '{slot.name}/{key}': its shape {tuple(value.shape)} is not the parameter's, "
                        f"so it cannot be joined. Say elementwise=False on the optimizer."
                    )
                shape = "cut"
            number = value.item() if value.ndim == 0 and value.dtype != torch.bfloat16 else None
            found.setdefault(slot.name, {})[key] = {
                "owner": rank,
                "shape": shape,
                "dtype": str(value.dtype),
                "value": number,
            }
    return found


def exchange(mine: dict[str, dict[str, _Entry]], axis: Axis, device: torch.device) -> dict[str, dict[str, _Entry]]:
    """The tables of all ranks as one; of several ranks with the same entry the first."""
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    longest = int(all_reduce(torch.tensor([text.numel()], device=device), axis, op="max"))
    padded = torch.nn.functional.pad(text, (0, longest - text.numel()), value=ord(" "))
    joined: dict[str, dict[str, _Entry]] = {}
    for row in all_gather(padded, axis).view(axis.size, -1).cpu():
        for name, entries in json.loads(bytes(row.tolist())).items():
            for key, entry in entries.items():
                joined.setdefault(name, {}).setdefault(key, entry)
    return joined
