"""What a wire carries from step to step, for each tensor that travels.

A step may not be taken: what `encode` leaves is kept when the step was (`commit`), and forgotten when it was not
(`discard`), so that nothing is owed for gradients that nobody applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from weft.comm.wire.low_rank import Matrix
from weft.comm.wire.wire_format import State, Wire


class Coder:
    """A wire and what it carries for one tensor; `wire=` of the collectives takes it.

    name: of the tensor, the same on all ranks. unit: what values are multiplied by as they travel (the loss scale over
    the nominal count), which debts are kept without. turn, calls: steps that were taken, and uses in this one: what
    rounds by chance draws from them.
    """

    def __init__(self, wire: Wire, name: str = ""):
        self.wire = wire
        self.name = name
        self.turn = self.calls = 0
        self.unit = 1.0
        #: Of a wire that sums matrices: where they lie in the tensor.
        self.matrices: Sequence[Matrix] = ()
        self._kept: dict[str, State] = {}
        self._next: dict[str, State] = {}

    def encode(self, role: str, x_RN: torch.Tensor, place: int) -> torch.Tensor:
        """Encode rows.

        Args:
            role: which of the tensors that one collective encodes: its summands, or their sums.
            x_RN: the rows.
            place: of this rank on the axis.
        """
        key = f"{role}-{x_RN.shape[0]}x{x_RN.shape[1]}"
        wire = self.wire
        if wire.by_chance:
            wire = wire.at(chance_key(self.turn, self.calls, self.name, role, place))
            self.calls += 1
        kept = self._next.get(key, self._kept.get(key))
        if wire.feeds_back:
            return self._encode_with_residual(key, x_RN, kept)
        codes, state = wire.encode(x_RN, kept)
        if state is not None:
            self._next[key] = state
        return codes

    def _encode_with_residual(self, key: str, x_RN: torch.Tensor, kept: State | None) -> torch.Tensor:
        """Encode what is there and what is owed; what is rounded off is owed from here, if the step is taken."""
        owing_RN = x_RN if kept is None else x_RN + kept["residual"] * self.unit
        codes, _ = self.wire.encode(owing_RN, None)
        self.owe(key, owing_RN - self.wire.decode(codes, x_RN.shape[1], x_RN.dtype))
        return codes

    def with_residual(self, key: str, x_RN: torch.Tensor) -> torch.Tensor:
        """Return what is there and what is owed, a new tensor."""
        kept = self._next.get(key, self._kept.get(key))
        return x_RN.clone() if kept is None else x_RN + kept["residual"] * self.unit

    def owe(self, key: str, rest_RN: torch.Tensor) -> None:
        """Keep this, which is changed in place, as owed, if the step is taken."""
        self._next[key] = {"residual": rest_RN.div_(self.unit)}

    def carried(self, key: str) -> State | None:
        """Return what the last step that was taken carried under a name."""
        return self._kept.get(key)

    def carry(self, key: str, state: State) -> None:
        """Let the next step have it, if this one is taken."""
        self._next[key] = state

    @property
    def begins(self) -> bool:
        """Whether this step, if it is taken, carries on what no step before did."""
        return any(state.keys() != self._kept.get(key, {}).keys() for key, state in self._next.items())

    def commit(self, clip: float = 1.0, taken: torch.Tensor | None = None) -> None:
        """Take over the states of this step: it was taken.

        Args:
            clip: what gradients were multiplied by. What is owed of them is smaller by as much: else what clipping
                took away would come back with the next step.
            taken: whether the step was taken, 0-d bool, where only the device knows and nothing `begins`.
        """
        if self.wire.feeds_back and clip != 1.0:
            for state in self._next.values():
                if "residual" in state:
                    state["residual"].mul_(clip)
        for key, state in self._next.items():
            if taken is None:
                self._kept[key] = state
            else:
                before = self._kept[key]
                self._kept[key] = {name: torch.where(taken, state[name], before[name]) for name in state}
        self._next = {}
        self.turn, self.calls = self.turn + 1, 0

    def discard(self) -> None:
        """Forget the states of this step: it was not taken."""
        self._next = {}
        self.calls = 0

    def take_turn(self, turn: int) -> None:
        """Go on as after so many steps."""
        self.turn, self.calls = turn, 0

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

    Args:
        wire: of gradients.
        outer: of gradients over the outermost data axis; None: the same.
    """

    def __init__(self, wire: Wire, outer: Wire | None = None):
        self.wire = wire
        self.outer_wire = outer or wire
        #: Steps that were published: what rounds by chance draws from it.
        self.turn = 0
        self.unit = 1.0
        #: So many first steps are summed without the wire of the outermost axis, where it asks for some.
        self.exact_steps = self.outer_wire.spec.exact_steps
        #: What others rounded off and still owe, by tensor: added to the sums of the first step that is taken.
        self.owed: dict[str, torch.Tensor] = {}
        #: Whether the step under way is taken, 0-d bool, where only the device knows; in no step that `needs_host`.
        self.taken: torch.Tensor | None = None
        self._coders: dict[str, Coder] = {}

    def __getitem__(self, name: str) -> Coder:
        """The coder of that tensor, made when it is first asked for. name: without "/"."""
        return self._coder(name, self.wire)

    def outer(self, name: str) -> Coder:
        """Return the coder of a tensor that travels over the outermost data axis. name: without "/"."""
        return self._coder(f"{name} outer", self.outer_wire)

    def _coder(self, name: str, wire: Wire) -> Coder:
        if name not in self._coders:
            self._coders[name] = Coder(wire, name)
            self._coders[name].take_turn(self.turn)
            self._coders[name].unit = self.unit
        return self._coders[name]

    @property
    def counts_turns(self) -> bool:
        """Whether what travels depends on `turn`."""
        return self.wire.by_chance or self.outer_wire.by_chance or self.outer_wire.spec.exact_steps > 0

    @property
    def is_exact(self) -> bool:
        """Whether this is one of the first steps, which go without the wire of the outermost axis."""
        return self.turn < self.exact_steps and self.outer_wire.spec.exact_steps > 0

    @property
    def needs_host(self) -> bool:
        """Whether the host must know if this step is taken: it clips debts, and a first state follows no other."""
        return self.has_residual or any(coder.begins for coder in self._coders.values())

    @property
    def has_residual(self) -> bool:
        """Whether anything of what is rounded off goes with the next step, or went with an earlier one and is owed."""
        return self.outer_wire.feeds_back or bool(self.owed)

    def set_unit(self, unit: float) -> None:
        """Say what this step's values are multiplied by as they travel."""
        self.unit = unit
        for coder in self._coders.values():
            coder.unit = unit

    def commit(self, clip: float = 1.0) -> None:
        """Take over the states of this step: it was taken, where `taken` does not say otherwise.

        clip: what gradients were multiplied by.
        """
        taken, self.taken = self.taken, None
        self.turn += 1
        self.owed.clear()
        for coder in self._coders.values():
            coder.commit(clip, taken)

    def discard(self) -> None:
        """Forget the states of this step: it was not taken."""
        for coder in self._coders.values():
            coder.discard()

    def forget(self) -> None:
        """Forget all states: tensors lie otherwise from here, and nothing is owed to anyone."""
        self.owed.clear()
        for coder in self._coders.values():  # which others hold
            coder.load({})

    def take_turn(self, turn: int) -> None:
        """Go on as after so many steps."""
        self.turn = turn
        for coder in self._coders.values():
            coder.take_turn(turn)

    def states(self) -> dict[str, torch.Tensor]:
        """Return what this rank keeps for its own plan, as `tensor/role/name`; not debts, which any plan takes."""
        return {
            f"{name}/{key}": tensor
            for name, coder in self._coders.items()
            for key, tensor in coder.states()
            if not (coder.wire.feeds_back and key.endswith("/residual"))
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what `states` gave on this rank."""
        self.forget()
        found: dict[str, dict[str, torch.Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, rest = full_name.partition("/")
            found.setdefault(name, {})[rest] = tensor
        for name, parts in found.items():
            coder = self._coder(name, self.outer_wire if name.endswith(" outer") else self.wire)
            coder.load(parts)


def chance_key(turn: int, call: int, name: str, role: str, place: int) -> int:
    """Return what rounding by chance is drawn from, of 64 bits: another for each step, tensor, use of it, and rank.

    Args:
        turn: steps that were taken before.
        call: uses of the coder in this step before.
        name: of the coder.
        role: which of a collective's tensors.
        place: of the rank on the axis.
    """
    text = f"{turn} {call} {place} {role} {name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
