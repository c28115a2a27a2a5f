"""An optimizer that was built on a module's parameters, working on this rank's pieces of them.

Each parameter stays an entry of its own in its group, so that groups with their weight decay and learning rate live
on. An optimizer that treats every element by itself may have any piece of a parameter; any other sees parameters whole
and they are divided among the ranks one by one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.errors import ModelError
from weft.parallel.zero.flat.buckets import Slot

#: Of torch's optimizers, those whose update of an element depends on that element's gradient and state alone.
ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)


class Adoption:
    """One adopted optimizer: which slot, or parameter that is none of ours, stands where in its groups.

    pieces: this rank's piece of each slot, as the optimizer sees it: the parameter itself where nothing is sharded
    or rounded. Raises ModelError for a trainable parameter that the module does not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, slots: list[Slot]):
        self.optimizer = optimizer
        self.pieces: dict[Slot, nn.Parameter] = {}
        by_param = {id(slot.param): slot for slot in slots}
        self._groups: list[list[Slot | nn.Parameter]] = []
        for group in optimizer.param_groups:
            places: list[Slot | nn.Parameter] = []
            for param in group["params"]:
                slot = by_param.get(id(param))
                if slot is None and param.requires_grad:
                    raise ModelError(
                        f"optimizer: it holds a parameter of shape {tuple(param.shape)} that the parallelized model "
                        f"does not have, so each rank would train its own. Make it a parameter of the model, before "
                        f"parallelize, or build the optimizer after parallelize."
                    )
                places.append(slot or param)
            self._groups.append(places)
        self._names = [group.get("param_names") for group in optimizer.param_groups]
        self._before = {slot: slot.param for slot in self.slots}

    @property
    def slots(self) -> list[Slot]:
        """The module's parameters among the optimizer's."""
        return [place for places in self._groups for place in places if isinstance(place, Slot)]

    def must_see_whole(self) -> frozenset[str]:
        """Names of the parameters of which the optimizer needs all elements.

        `elementwise=True` in a parameter group, or as an attribute of the optimizer's class, says that it does not.
        """
        usual = getattr(self.optimizer, "elementwise", type(self.optimizer) in ELEMENTWISE)
        return frozenset(
            place.name
            for group, places in zip(self.optimizer.param_groups, self._groups, strict=True)
            if not group.get("elementwise", usual)
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
            group["params"] = [param for param in kept if param is not None]
            if names is not None:
                group["param_names"] = [name for name, param in zip(names, kept, strict=True) if param is not None]
        self._before = {slot: self.pieces.get(slot, slot.param) for slot in self.slots}


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
