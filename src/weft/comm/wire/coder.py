"""What a wire carries from step to step, for each tensor that travels.

A step may not be taken: what `encode` leaves is kept when the step was (`commit`), and forgotten when it was not
(`discard`), so that nothing is owed for gradients that nobody applied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weft.comm.wire.wire import State, Wire


class Coder:
    """A wire and what it carries for one tensor; `wire=` of the collectives takes it."""

    def __init__(self, wire: Wire):
        self.wire = wire
        self._kept: dict[str, State] = {}
        self._next: dict[str, State] = {}

    def encode(self, role: str, x_RN: torch.Tensor) -> torch.Tensor:
        """Encode rows. role: which of the tensors that one collective encodes: its summands, or their sums."""
        key = f"{role}-{x_RN.shape[0]}x{x_RN.shape[1]}"
        codes, state = self.wire.encode(x_RN, self._next.get(key, self._kept.get(key)))
        if state is not None:
            self._next[key] = state
        return codes

    @property
    def begins(self) -> bool:
        """Whether this step, if it is taken, carries on what no step before did."""
        return any(state.keys() != self._kept.get(key, {}).keys() for key, state in self._next.items())

    def commit(self, taken: torch.Tensor | None = None) -> None:
        """Take over the states of this step: it was taken. taken: whether it was, 0-d bool, where nothing `begins`."""
        for key, state in self._next.items():
            if taken is None:
                self._kept[key] = state
            else:
                before = self._kept[key]
                self._kept[key] = {name: torch.where(taken, state[name], before[name]) for name in state}
        self._next = {}

    def discard(self) -> None:
        """Forget the states of this step: it was not taken."""
        self._next = {}

    def states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is kept, as (`role/name`, tensor)."""
        for key, state in self._kept.items():
            yield from ((f"{key}/{name}", tensor) for name, tensor in state.items())

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what `states` gave."""
        self._kept, self._next = {}, {}
        for full_name, tensor in tensors.items():
            key, _, name = full_name.rpartition("/")
            self._kept[key] = {**self._kept.get(key, {}), name: tensor}


class Coders:
    """The coders of an engine's tensors, by name.

    taken: whether the step under way is taken, 0-d bool, where only the device knows; for a step in which nothing
    `begins`.
    """

    def __init__(self, wire: Wire):
        self.wire = wire
        self.taken: torch.Tensor | None = None
        self._coders: dict[str, Coder] = {}

    def __getitem__(self, name: str) -> Coder:
        """The coder of that tensor, made when it is first asked for. name: without "/"."""
        if name not in self._coders:
            self._coders[name] = Coder(self.wire)
        return self._coders[name]

    @property
    def begins(self) -> bool:
        """Whether this step, if it is taken, carries on what no step before did."""
        return any(coder.begins for coder in self._coders.values())

    def commit(self) -> None:
        """Take over the states of this step: it was taken, where `taken` does not say otherwise."""
        taken, self.taken = self.taken, None
        for coder in self._coders.values():
            coder.commit(taken)

    def discard(self) -> None:
        """Forget the states of this step: it was not taken."""
        for coder in self._coders.values():
            coder.discard()

    def forget(self) -> None:
        """Forget all states: tensors lie otherwise from here, and nothing is owed to anyone."""
        for coder in self._coders.values():  # which others hold
            coder.load({})

    def states(self) -> dict[str, torch.Tensor]:
        """Return what this rank keeps, as `tensor/role/name`."""
        return {f"{name}/{key}": t for name, coder in self._coders.items() for key, t in coder.states()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what `states` gave on this rank."""
        self.forget()
        found: dict[str, dict[str, torch.Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, rest = full_name.partition("/")
            found.setdefault(name, {})[rest] = tensor
        for name, parts in found.items():
            self[name].load(parts)
