"""torch's AdamW, Adam and SGD over whole stretches of buckets, in place of one parameter after another.

Parameters of a bucket whose groups say the same are one stretch of memory, with what lies between them: zeros, which
stay zero. Their states are views of flat tensors, so everybody else finds them in the optimizer, parameter by
parameter. The factor on gradients and the rounding of new weights are part of the same pass (`optim/one_pass.py`).
Other optimizers, options that torch's fused kernels lack, and steps that a user's hook looks at go the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.memory.replay import Recorder
from weft.optim import AdamRule, Lane, SgdRule, StepDecision, step_lane
from weft.parallel.private_torch import num_step_hooks
from weft.parallel.zero.flat.buckets import Bucket, Slot
from weft.parallel.zero.flat.recorded import RecordedSteps
from weft.parallel.zero.flat.slot_adoption import SlotAdoption
from weft.private_torch import version_of

Rule = AdamRule | SgdRule
#: Hooks around a step that Weft itself registers: before and after.
_OWN_HOOKS = 2
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(slots=True, eq=False)
class _Entry:
    """One piece of a parameter: where it stands in its bucket's part, and its states, as views by key."""

    slot: Slot
    piece: nn.Parameter
    group: int
    start: int
    end: int
    views: dict[str, torch.Tensor]
    count: int = 0


@dataclass(slots=True, eq=False)
class _Held:
    """The pieces of one bucket in order, each with its number among all that lie there, and flat states by key."""

    bucket: Bucket
    entries: list[tuple[int, _Entry]]
    flat: dict[str, torch.Tensor]
    is_all: bool


class FlatStep:
    """The step of one adopted optimizer."""

    def __init__(self, adoption: SlotAdoption):
        self._adoption = adoption
        self._bound: object = None
        self._held: list[_Held] = []
        self._counters: list[tuple[torch.Tensor, list[_Entry], int]] = []  # with the version that the counts are of
        self._decision: StepDecision | None = None  # of a step that was counted, and may not have been taken
        self._recorded = RecordedSteps()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self._adoption.optimizer

    @property
    def is_watched(self) -> bool:
        """Whether hooks of a user's look at the optimizer's steps."""
        return num_step_hooks(self._optimizer) > _OWN_HOOKS

    def applies(self) -> bool:
        """Whether this optimizer, as it is set now, can take its step here."""
        optimizer = self._optimizer
        if self.is_watched:
            return False
        if not all(bucket.master.is_floating_point() for bucket in self._buckets()):
            return False
        if type(optimizer) in _ADAMS:
            return all(map(_is_plain_adam, optimizer.param_groups))
        return type(optimizer) is torch.optim.SGD and all(map(_is_plain_sgd, optimizer.param_groups))

    @torch.no_grad()
    def taking(self, factor: float | StepDecision, recorder: Recorder | None = None) -> Callable[[Bucket], None]:
        """Begin a step. Returns what steps the pieces of one bucket; `taken` ends it.

        Args:
            factor: what gradients are multiplied by as they are read.
            recorder: of steps that the device decides about: these take all buckets here; None: none is recorded.
        """
        self._bind()
        by_bucket = {held.bucket: held for held in self._held}
        is_recorded = False
        if recorder is not None and isinstance(factor, StepDecision):
            self._recorded.take(*self._found(), self._all_lanes, factor, recorder)
            is_recorded = True

        @torch.no_grad()
        def take(bucket: Bucket) -> None:
            if (held := by_bucket.get(bucket)) is None:
                return
            if not is_recorded:
                here = factor.factor_for(bucket.master.dtype) if isinstance(factor, StepDecision) else factor
                for lane, rule in self._lanes(held):
                    step_lane(lane, rule, here)
            bucket.is_rounded = held.is_all and bucket.host is None and not bucket.differs

        return take

    def _found(self) -> tuple[Hashable, dict[Rule, int]]:
        """What a recording of the step depends on, and the rules of its lanes, numbered."""
        rules: dict[Rule, int] = {}
        numbers: dict[tuple[int, int], int] = {}  # by group and count, of which an entry's rule is made
        marks: list[int] = []
        places: list[int] = []
        for held in self._held:
            bucket = held.bucket
            grads = [bucket.shard] if bucket.loose is None else [grad for _, grad in bucket.loose]
            every = bucket.master, bucket.weights, *held.flat.values(), *grads
            places += [one.data_ptr() for one in every if one is not None]
            for _, entry in held.entries:
                kind = entry.group, entry.count
                if kind not in numbers:
                    numbers[kind] = rules.setdefault(self._rule(entry), len(rules))
                marks.append(numbers[kind])
        return (tuple(marks), tuple(places), tuple(rule.without_dials for rule in rules)), rules

    def taken(self, factor: float | StepDecision) -> None:
        """Count a step of all buckets."""
        self._count(1)
        self._decision = factor if isinstance(factor, StepDecision) else None

    @torch.no_grad()
    def settle(self) -> None:
        """Take the last step out of the counts where the device did not take it. Waits for its decision."""
        decision, self._decision = self._decision, None
        if decision is not None and not decision.was_taken:
            self._count(-1)

    @torch.no_grad()
    def _count(self, number: int) -> None:
        for index, (counter, entries, _) in enumerate(self._counters):
            counter.add_(number)
            self._counters[index] = (counter, entries, version_of(counter))
            for entry in entries:
                entry.count += number

    def _buckets(self) -> list[Bucket]:
        return list(dict.fromkeys(slot.bucket for slot in self._adoption.pieces if slot.bucket is not None))

    @torch.no_grad()
    def _bind(self) -> None:
        """Have states of all pieces in flat tensors, and know the number of steps that each has seen."""
        if self._bound is not self._adoption.pieces:
            self._lay_out()
        state, moved = self._optimizer.state, False
        for held in self._held:
            for _, entry in held.entries:
                found = state[entry.piece]
                for key, view in entry.views.items():
                    if found.get(key) is not view:
                        _take_over(found, key, view)
                        moved = moved or key == "step"
        for index, (counter, entries, version) in enumerate(self._counters):
            if moved or version != version_of(counter):
                for entry, count in zip(entries, counter.tolist(), strict=True):
                    entry.count = int(count)
                self._counters[index] = (counter, entries, version_of(counter))

    def _lay_out(self) -> None:
        groups = {id(piece): index for index, piece in self._grouped()}
        self._bound, self._held, self._counters = self._adoption.pieces, [], []
        by_device: dict[torch.device, list[_Entry]] = {}
        for bucket in self._buckets():
            inside = sorted((slot for slot in bucket.slots if slot.is_in(bucket.own)), key=lambda slot: slot.start)
            entries: list[tuple[int, _Entry]] = []
            flat: dict[str, torch.Tensor] = {}
            for number, slot in enumerate(inside):
                piece = self._adoption.pieces.get(slot)
                if piece is None or id(piece) not in groups:
                    continue
                group = groups[id(piece)]
                start, end = (place - bucket.own.start for place in slot.inside(bucket.own))
                entry = _Entry(slot, piece, group, start, end, {})
                for key in _keys(self._optimizer, self._optimizer.param_groups[group]):
                    if key not in flat:
                        flat[key] = torch.zeros_like(bucket.master)
                    view = slot.piece(flat[key], bucket.own)
                    assert view is not None
                    entry.views[key] = view
                entries.append((number, entry))
                if type(self._optimizer) in _ADAMS:
                    is_fused = self._optimizer.param_groups[group].get("fused")
                    by_device.setdefault(piece.device if is_fused else torch.device("cpu"), []).append(entry)
            self._held.append(_Held(bucket, entries, flat, len(entries) == len(inside)))
        for device, members in by_device.items():
            counter = torch.zeros(len(members), dtype=torch.float32, device=device)
            for entry, view in zip(members, counter.unbind(), strict=True):
                entry.views["step"] = view
            self._counters.append((counter, members, version_of(counter)))

    def _grouped(self) -> Iterator[tuple[int, nn.Parameter]]:
        for index, group in enumerate(self._optimizer.param_groups):
            yield from ((index, param) for param in group["params"])

    def _all_lanes(self) -> Iterator[tuple[Lane, Rule]]:
        for held in self._held:
            yield from self._lanes(held)

    def _lanes(self, held: _Held) -> Iterator[tuple[Lane, Rule]]:
        """What is stepped together, with its rule."""
        bucket = held.bucket
        if bucket.loose is not None:
            grads = dict(bucket.loose)
            for _, entry in held.entries:
                if entry.end > entry.start:
                    states = tuple(entry.views[key] for key in held.flat)
                    weights = entry.slot.of(bucket.weights) if bucket.is_mixed else None
                    lane = Lane(entry.piece.detach(), grads[entry.slot], states, weights)
                    yield lane, self._rule(entry)
            return
        bucket.collect()
        grad = bucket.shard if bucket.host is None else bucket.host.grad
        assert grad is not None
        weights = bucket.weights[bucket.own] if bucket.is_mixed and not bucket.differs and bucket.host is None else None
        for start, end, rule in self._stretches(held):
            states = tuple(flat[start:end] for flat in held.flat.values())
            rounded = None if weights is None else weights[start:end]
            yield Lane(bucket.master.detach()[start:end], grad[start:end], states, rounded), rule

    def _stretches(self, held: _Held) -> Iterator[tuple[int, int, Rule]]:
        """First element, end and rule of neighbours with one rule."""
        last: tuple[int, int, Rule] | None = None
        before = -1
        for number, entry in held.entries:
            rule = self._rule(entry)
            if last is not None and number == before + 1 and rule == last[2]:
                last = (last[0], entry.end, rule)
            else:
                if last is not None and last[1] > last[0]:
                    yield last
                last = (entry.start, entry.end, rule)
            before = number
        if last is not None and last[1] > last[0]:
            yield last

    def _rule(self, entry: _Entry) -> Rule:
        group = self._optimizer.param_groups[entry.group]
        if type(self._optimizer) is torch.optim.SGD:
            return SgdRule(group["lr"], group["momentum"], group["weight_decay"], group["nesterov"])
        beta1, beta2 = group["betas"]
        decoupled = type(self._optimizer) is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        scalars = group["lr"], beta1, beta2, group["eps"], group["weight_decay"]
        return AdamRule(entry.count + 1, *scalars, decoupled)


def _take_over(state: dict[str, Any], key: str, view: torch.Tensor) -> None:
    """Put a view of flat memory in the place of a state, with its numbers; zero where there was none."""
    value = state.get(key)
    if isinstance(value, torch.Tensor):
        view.copy_(value)
    else:
        view.fill_(0 if value is None else value)
    state[key] = view


def _keys(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """States that are as large as the parameter."""
    if type(optimizer) in _ADAMS:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] else ()


def _is_plain_adam(group: dict[str, Any]) -> bool:
    numbers = (group["lr"], group["weight_decay"], group["eps"], *group["betas"])
    unusual = any(group.get(key) for key in ("amsgrad", "maximize", "differentiable", "capturable"))
    return not unusual and group["eps"] > 0 and all(isinstance(number, int | float) for number in numbers)


def _is_plain_sgd(group: dict[str, Any]) -> bool:
    numbers = (group["lr"], group["weight_decay"], group["momentum"])
    unusual = any(group.get(key) for key in ("dampening", "maximize", "differentiable"))
    return not unusual and all(isinstance(number, int | float) for number in numbers)
