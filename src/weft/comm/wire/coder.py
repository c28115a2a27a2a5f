"""State of wire formats (`Wire`) between steps, such as residuals of error feedback, for each communicated tensor.

A step may be skipped. A `Coder` therefore stores the new states of a step only if it was applied (`commit`), and drops
them if it was not (`discard`), so that error feedback never includes gradients that were not applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from weft.comm.wire.low_rank import Matrix
from weft.comm.wire.wire_format import State, Wire


class Coder:
    """A wire and its state for one tensor: the `wire=` argument of collectives.

    `name` is the tensor's name, the same on all ranks. `unit` is the factor of communicated values (loss scale over
    nominal count); residuals are stored without it. `turn` counts applied steps and `calls` the uses in the current
    step; stochastic rounding is keyed by both.
    """

    def __init__(self, wire: Wire, name: str = ""):
        self.wire, self.name = wire, name
        self.turn = self.calls = 0
        self.unit = 1.0
        #: Positions of matrices in the tensor, for a wire that sums matrices.
        self.matrices: Sequence[Matrix] = ()
        self._kept: dict[str, State] = {}
        self._next: dict[str, State] = {}

    def encode(self, role: str, x_RN: torch.Tensor, place: int) -> torch.Tensor:
        """Encode rows, uint8 (R, bytes). The next state is kept until `commit` or `discard`.

        role: use of the rows ("summands", "sums" or "shard"). place: this rank's index.
        """
        key = f"{role}-{x_RN.shape[0]}x{x_RN.shape[1]}"
        wire = self.wire
        if wire.by_chance:
            wire = wire.at(chance_key(self.turn, self.calls, self.name, role, place))
            self.calls += 1
        kept = self._next.get(key, self._kept.get(key))
        if wire.feeds_back:
            # The new rounding error becomes the residual if the step is applied.
            owing_RN = x_RN if kept is None else x_RN + kept["residual"] * self.unit
            codes, _ = self.wire.encode(owing_RN, None)
            self.owe(key, owing_RN - self.wire.decode(codes, x_RN.shape[1], x_RN.dtype))
            return codes
        codes, state = wire.encode(x_RN, kept)
        if state is not None:
            self._next[key] = state
        return codes

    def with_residual(self, key: str, x_RN: torch.Tensor) -> torch.Tensor:
        """Return values plus residual in a new tensor."""
        kept = self._next.get(key, self._kept.get(key))
        return x_RN.clone() if kept is None else x_RN + kept["residual"] * self.unit

    def owe(self, key: str, rest_RN: torch.Tensor) -> None:
        """Keep `rest_RN` as the residual if the step is applied. Divides it by `unit` in place."""
        self._next[key] = {"residual": rest_RN.div_(self.unit)}

    def carried(self, key: str) -> State | None:
        """Return the state that the last applied step stored under a key, or None if there is no such state."""
        return self._kept.get(key)

    def carry(self, key: str, state: State) -> None:
        """Keep a state for the next step if this one is applied."""
        self._next[key] = state

    @property
    def begins(self) -> bool:
        """True if this step would store a state that no earlier step stored."""
        return any(state.keys() != self._kept.get(key, {}).keys() for key, state in self._next.items())

    def commit(self, clip: float = 1.0, taken: torch.Tensor | None = None) -> None:
        """Keep the states of this step, which was applied, and count the step.

        clip: factor by which gradients were clipped. Residuals are scaled by it too, because clipped gradient would
        otherwise return with the next step. taken: True if the step was applied, as a 0-d bool tensor, if only the
        device has the value; if it is False, the old states are kept. Not allowed if the coder `begins`.
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
        """Drop the states of this step, which was not applied."""
        self._next = {}
        self.calls = 0

    def take_turn(self, turn: int) -> None:
        """Set the number of applied steps to `turn`, as after loading a checkpoint."""
        self.turn, self.calls = turn, 0

    def states(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the stored states as (`role/name`, tensor)."""
        for key, state in self._kept.items():
            yield from ((f"{key}/{name}", tensor) for name, tensor in state.items())

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all states by the tensors of `states`."""
        self._kept, self._next = {}, {}
        for full_name, tensor in tensors.items():
            key, _, name = full_name.rpartition("/")
            self._kept[key] = {**self._kept.get(key, {}), name: tensor}


class Coders:
    """The coders of an engine's tensors, by name.

    wire: wire of all reductions except those by `outer`. outer: wire over the outermost data axis, or None for `wire`.
    """

    def __init__(self, wire: Wire, outer: Wire | None = None):
        self.wire = wire
        self.outer_wire = outer or wire
        #: Number of applied steps; stochastic rounding is keyed by it.
        self.turn = 0
        self.unit = 1.0
        #: Number of first steps that are summed without the outermost axis's wire.
        self.exact_steps = self.outer_wire.spec.exact_steps
        #: Residuals of other ranks by tensor, which are added to the sums of the first applied step.
        self.owed: dict[str, torch.Tensor] = {}
        #: True if the current step is applied, as a 0-d bool tensor, if only the device has the value; else None. It is
        #: None in all steps with `needs_host`.
        self.taken: torch.Tensor | None = None
        self._coders: dict[str, Coder] = {}

    def __getitem__(self, name: str) -> Coder:
        """Return the coder of a tensor, created on first use. The name contains no "/"."""
        return self._coder(name, self.wire)

    def outer(self, name: str) -> Coder:
        """Return the coder of a tensor over the outermost data axis. The name contains no "/"."""
        return self._coder(f"{name} outer", self.outer_wire)

    def _coder(self, name: str, wire: Wire) -> Coder:
        if name not in self._coders:
            self._coders[name] = Coder(wire, name)
            self._coders[name].take_turn(self.turn)
            self._coders[name].unit = self.unit
        return self._coders[name]

    @property
    def counts_turns(self) -> bool:
        """True if encoding depends on the number of applied steps (stochastic rounding, or exact first steps)."""
        return self.wire.by_chance or self.outer_wire.by_chance or self.outer_wire.spec.exact_steps > 0

    @property
    def is_exact(self) -> bool:
        """True if this is one of the first steps, which do not use the outermost axis's wire."""
        return self.turn < self.exact_steps and self.outer_wire.spec.exact_steps > 0

    @property
    def needs_host(self) -> bool:
        """True if the host must know whether this step is applied.

        The host needs it to clip residuals, or because a state is stored for the first time.
        """
        return self.has_residual or any(coder.begins for coder in self._coders.values())

    @property
    def has_residual(self) -> bool:
        """True if rounding error is added to the next step, or a residual of an earlier step is pending."""
        return self.outer_wire.feeds_back or bool(self.owed)

    def set_unit(self, unit: float) -> None:
        """Set the factor of this step's communicated values."""
        self.unit = unit
        for coder in self._coders.values():
            coder.unit = unit

    def commit(self, clip: float = 1.0) -> None:
        """Keep the states of this step, which was applied unless `taken` is False, and count it. Clears `owed`."""
        taken, self.taken = self.taken, None
        self.turn += 1
        self.owed.clear()
        for coder in self._coders.values():
            coder.commit(clip, taken)

    def discard(self) -> None:
        """Drop the states of this step, which was not applied."""
        for coder in self._coders.values():
            coder.discard()

    def forget(self) -> None:
        """Drop all states and residuals, because the layout of the tensors changes."""
        self.owed.clear()
        for coder in self._coders.values():  # which others hold
            coder.load({})

    def take_turn(self, turn: int) -> None:
        """Set the number of applied steps to `turn`, as after loading a checkpoint."""
        self.turn = turn
        for coder in self._coders.values():
            coder.take_turn(turn)

    def states(self) -> dict[str, torch.Tensor]:
        """Return this rank's states as `tensor/role/name`, without residuals, which checkpoints store for any plan."""
        return {
            f"{name}/{key}": tensor
            for name, coder in self._coders.items()
            for key, tensor in coder.states()
            if not (coder.wire.feeds_back and key.endswith("/residual"))
        }

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace all states and residuals of this rank by the tensors of `states`."""
        self.forget()
        found: dict[str, dict[str, torch.Tensor]] = {}
        for full_name, tensor in tensors.items():
            name, _, rest = full_name.partition("/")
            found.setdefault(name, {})[rest] = tensor
        for name, parts in found.items():
            coder = self._coder(name, self.outer_wire if name.endswith(" outer") else self.wire)
            coder.load(parts)


def chance_key(turn: int, call: int, name: str, role: str, place: int) -> int:
    """Return a 64-bit key for stochastic rounding that differs by step, tensor, use and rank.

    turn: number of applied steps before. call: number of uses of the coder in this step before.
    """
    text = f"{turn} {call} {place} {role} {name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
