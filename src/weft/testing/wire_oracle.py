"""What ranks must get that sum tensors as a wire: the same codec, on one process, without a collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from weft.comm.wire import State, chance_key, find_wire


class WireOracle:
    """Sums over ranks by one wire, step after step; keeps what every rank would carry. name: of the wire.

    key: the name of the tensor's coder.
    """

    def __init__(self, name: str):
        self._wire = find_wire(name)
        self._states: dict[tuple[object, ...], State] = {}
        self.turn = 0
        self.calls = 0
        self._calls: dict[tuple[object, int], int] = {}

    def commit(self) -> None:
        """Go on to the next step."""
        self.turn, self.calls, self._calls = self.turn + 1, 0, {}

    def reduce_scatter(self, flats: Sequence[torch.Tensor], key: object) -> list[torch.Tensor]:
        """Each rank's part of the sum of all ranks' flat tensors."""
        if (added_in := self._wire.added_in(flats[0].dtype)) is not None:
            return list(_add(flats, added_in).chunk(len(flats)))
        parts = [self._travelled(flat.view(len(flats), -1), (key, rank), "summands") for rank, flat in enumerate(flats)]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return list(total)

    def all_reduce(self, flats: Sequence[torch.Tensor], key: object) -> torch.Tensor:
        """The sum of all ranks' flat tensors."""
        if (added_in := self._wire.added_in(flats[0].dtype)) is not None:
            return _add(flats, added_in)
        numel, size = flats[0].numel(), len(flats)
        if size == 2:
            one, other = (self._travelled(flat[None], (key, rank), "summands") for rank, flat in enumerate(flats))
            return (one + other).view(-1)
        sums = self.reduce_scatter([pad(flat, (0, -numel % size)) for flat in flats], key)
        gathered = [self._travelled(part[None], (key, rank), "sums") for rank, part in enumerate(sums)]
        return torch.cat(gathered, 1).view(-1)[:numel]

    def _travelled(self, rows_RN: torch.Tensor, key: tuple[object, int], role: str) -> torch.Tensor:
        name, rank = key
        calls = self._calls.get((name, rank), 0)
        wire = self._wire.at(chance_key(self.turn, self.calls + calls, str(name), role, rank))
        self._calls[name, rank] = calls + 1
        codes, state = wire.encode(rows_RN, self._states.get((*key, role)))
        if state is not None:
            self._states[*key, role] = state
        return self._wire.decode(codes, rows_RN.shape[1], rows_RN.dtype)


def _add(flats: Sequence[torch.Tensor], added_in: torch.dtype) -> torch.Tensor:
    """In a tree over ranks; summands and the sum are rounded to `added_in`, which is added in float32 at least."""
    wide = torch.promote_types(added_in, torch.float32)
    level = [flat.to(added_in).to(wide) for flat in flats]
    while len(level) > 1:
        pairs = [level[at : at + 2] for at in range(0, len(level), 2)]
        level = [pair[0] if len(pair) == 1 else pair[0] + pair[1] for pair in pairs]
    return level[0].to(added_in).to(flats[0].dtype)
