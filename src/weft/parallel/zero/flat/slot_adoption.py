"""An optimizer that works on this rank's pieces of parameters in flat buckets.

Where it must see parameters whole, they are divided among the ranks one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.parallel.zero.adopt import fill_group, is_elementwise, not_of_model
from weft.parallel.zero.flat.buckets import Slot


class SlotAdoption:
    """One adopted optimizer: which slot, or parameter that is none of ours, stands where in its groups.

    pieces: this rank's piece of each slot, as the optimizer sees it: the parameter itself where nothing is sharded
    or rounded. Raises ModelError for a trainable parameter that the module does not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, slots: list[Slot]):
        self.optimizer = optimizer
        self.is_spent = False  # inside of `spent`
        self.pieces: dict[Slot, nn.Parameter] = {}
        by_param = {id(slot.param): slot for slot in slots}
        self._groups: list[list[Slot | nn.Parameter]] = []
        for group in optimizer.param_groups:
            places: list[Slot | nn.Parameter] = []
            for param in group["params"]:
                slot = by_param.get(id(param))
                if slot is None and param.requires_grad:
                    raise not_of_model(param)
                places.append(slot or param)
            self._groups.append(places)
        self._names = [group.get("param_names") for group in optimizer.param_groups]
        self._before = {slot: slot.param for slot in self.slots}

    @property
    def slots(self) -> list[Slot]:
        """The module's parameters among the optimizer's."""
        return [place for places in self._groups for place in places if isinstance(place, Slot)]

    def must_see_whole(self) -> frozenset[str]:
        """Names of the parameters of which the optimizer needs all elements."""
        return frozenset(
            place.name
            for group, places in zip(self.optimizer.param_groups, self._groups, strict=True)
            if not is_elementwise(self.optimizer, group)
            for place in places
            if isinstance(place, Slot)
        )

    def put(self) -> None:
        """Put this rank's pieces into the groups; states that the optimizer has already are cut to fit."""
        self.pieces = {}
        for slot in self.slots:
            piece = _own_piece(slot)
            if piece is not None:
                self.pieces[slot] = piece
            held = self._before[slot]
            if held is not piece and (state := self.optimizer.state.pop(held, None)) and piece is not None:
                self.optimizer.state[piece] = _cut_state(state, slot, held, piece)
        for group, places, names in zip(self.optimizer.param_groups, self._groups, self._names, strict=True):
            kept = [(self.pieces.get(place) if isinstance(place, Slot) else place) for place in places]
            fill_group(group, kept, names)
        self._before = {slot: self.pieces.get(slot, slot.param) for slot in self.slots}

    @contextmanager
    def spent(self) -> Iterator[None]:
        """While inside, the optimizer finds no gradient: its own step calls hooks and schedulers, and does no more."""
        grads = [(piece, piece.grad) for piece in self.pieces.values()]
        for piece, _ in grads:
            piece.grad = None
        self.is_spent = True
        try:
            yield
        finally:
            self.is_spent = False
            for piece, grad in grads:
                piece.grad = grad


def _own_piece(slot: Slot) -> nn.Parameter | None:
    bucket = slot.bucket
    assert bucket is not None
    if bucket.num_shards == 1 and not bucket.is_mixed:
        return slot.param
    piece = slot.piece(bucket.master, bucket.own)
    return None if piece is None else nn.Parameter(piece)


def _cut_state(state: dict[str, Any], slot: Slot, held: nn.Parameter, piece: nn.Parameter) -> dict[str, Any]:
    """What of a parameter's state belongs to a piece of it: Adagrad makes states when it is built."""
    if held is not slot.param:
        return {}  # pieces were laid out anew: the whole states come by `load_states`
    assert slot.bucket is not None
    return {
        key: slot.cut(value, slot.bucket.own).to(piece.dtype).clone()
        if isinstance(value, torch.Tensor) and value.shape == slot.shape and value.is_floating_point()
        else value
        for key, value in state.items()
    }
