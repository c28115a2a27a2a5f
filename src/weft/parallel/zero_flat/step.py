"""Recorded (CUDA graph) microbatches, and recorded or fused optimizer steps over flat buckets.

While a microbatch is recorded, autograd's hooks run as usual. They copy gradients into buckets, accumulate them, or
leave them in autograd's tensors, and all those kernels are recorded. A replay runs only the kernels, so the Python
state that the hooks left is restored after it. No communication starts before a recorded microbatch ends.

A recorded step reads all values that change between steps from memory: learning rates, step counts, gradient factor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from weft.errors import WeftWarning
from weft.memory.graph_recorder import Recorder, Recording, send_numbers
from weft.optim.one_pass import AdamRule, Lane, SgdRule, step_lane
from weft.optim.step_decision import StepDecision
from weft.parallel.private_torch import num_step_hooks
from weft.parallel.state.flat_slices import PlacedPart, register_param_locations
from weft.parallel.state.gradients import join_sharded
from weft.parallel.state.placement import Axes, AxisMap
from weft.parallel.zero.engine import Phase, leaves_steps_out, undo_skipped_counts
from weft.parallel.zero_flat.buckets import Bucket, Slot
from weft.parallel.zero_flat.optimizer_states import SlotAdoption, gather_states, load_states
from weft.parallel.zero_flat.reducer import Reducer, shard_of
from weft.private_torch import version_of

Rule = AdamRule | SgdRule
#: Maximum number of recordings of an optimizer's step. Gradients have other addresses for each recorded batch shape.
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class PassEnd:
    """Gradient state after a microbatch.

    Attributes:
        slots: for each parameter, `param.grad`, its view of the bucket's gradient, and how often autograd has delivered
            its gradient in this backward (`Slot.fired`).
        buckets: for each bucket, its full gradients, and True if gradients were collected in them.
    """

    slots: tuple[tuple[torch.Tensor | None, torch.Tensor | None, int], ...]
    buckets: tuple[tuple[torch.Tensor | None, bool], ...]


class RecordedPasses:
    """Gradient state of a step, which recordings of microbatches read and restore.

    recorder: records and replays, or None to launch all kernels one by one.
    """

    def __init__(self, slots: Sequence[Slot], reducer: Reducer):
        self.recorder: Recorder | None = None
        self._slots, self._reducer = slots, reducer

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Hold the microbatch's gradient communication back until it ends, and wait for all weights before it."""
        self._reducer.holds = True
        try:
            yield
        finally:
            self._reducer.holds = False

    def found(self, last: bool) -> Hashable:
        """Return a key of the state at the start of a microbatch. Microbatches with equal keys run the same kernels."""
        phase = Phase.LAST_PASS if last else Phase.INNER_PASS
        return (
            tuple((slot.param.data_ptr(), _address(slot.param.grad), slot.expected) for slot in self._slots),
            tuple(
                (
                    bucket.collected,
                    None if self._reducer.stays(bucket, phase) and not bucket.collected else _address(bucket.grads),
                )
                for bucket in self._reducer.buckets
            ),
        )

    def keeps(self, last: bool) -> bool:
        """Return True if gradients that a microbatch leaves in autograd's tensors are needed by later microbatches.

        last: True for the last microbatch of a step.
        """
        return not last and any(self._reducer.stays(bucket, Phase.INNER_PASS) for bucket in self._reducer.buckets)

    def left(self) -> PassEnd:
        """Return the state that the current microbatch has left."""
        return PassEnd(
            tuple((slot.param.grad, slot.grad, slot.fired) for slot in self._slots),
            tuple((bucket.grads, bucket.collected) for bucket in self._reducer.buckets),
        )

    def leave(self, end: PassEnd) -> None:
        """Restore the recorded state after a replay."""
        for slot, (grad, view, fired) in zip(self._slots, end.slots, strict=True):
            slot.param.grad, slot.grad, slot.fired = grad, view, fired
        for bucket, (grads, collected) in zip(self._reducer.buckets, end.buckets, strict=True):
            bucket.grads, bucket.collected = grads, collected


class RecordedSteps:
    """The recorded steps of one optimizer."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _RecordedStep] = {}
        self._once: dict[Hashable, _RecordedStep] = {}  # taken once, not recorded yet
        self._has_said = False

    def take(
        self, found: Hashable, rules: Mapping[Rule, int], lanes: Callable[[], Iterable[tuple[Lane, Rule]]],
        decision: StepDecision, recorder: Recorder,
    ) -> None:  # fmt: skip
        """Step all lanes (slices with one rule) by replay, or kernel by kernel.

        A step is launched kernel by kernel the first time, and recorded the second time, up to MOST_STEPS recordings.

        Args:
            found: key of all tensors' addresses and the constant settings of the rules.
            rules: rules of the lanes, numbered in their order.
            lanes: returns the lanes, each with its rule.
            decision: provides the gradient factor, which is NaN if the device skips the step.
            recorder: records and replays.
        """
        step = self._known.get(found) or self._once.pop(found, None)
        is_new = step is None
        if step is None:
            step = self._once[found] = _RecordedStep(decision, rules)
            if len(self._once) > MOST_STEPS:
                del self._once[next(iter(self._once))]
        step.fill(rules, decision)
        if step.recording is not None:
            step.recording.replay()
        elif is_new or len(self._known) >= MOST_STEPS:
            step.launch(rules, lanes())  # without recording, which also loads the kernels
            if not is_new and not self._has_said:
                self._has_said = True
                warnings.warn(
                    f"graphs=on: the optimizer's step is recorded {MOST_STEPS} times, for different settings or "
                    "gradient addresses, and further ones are launched kernel by kernel.",
                    WeftWarning,
                    stacklevel=2,
                )
        else:
            step.recording = recorder.record(lambda: step.launch(rules, lanes()), "the optimizer's step", apart=True)
            self._known[found] = step


class _RecordedStep:
    """One recording, and the memory that it reads. decision, rules: from any step; only their shapes matter."""

    def __init__(self, decision: StepDecision, rules: Iterable[Rule]):
        self.recording: Recording[None] | None = None
        dials = torch.tensor([rule.dials for rule in rules], dtype=torch.float64)
        self._dials = torch.zeros_like(dials, device=decision.factor.device)
        self._factor = torch.zeros_like(decision.factor)

    def fill(self, rules: Iterable[Rule], decision: StepDecision) -> None:
        send_numbers([rule.dials for rule in rules], self._dials)
        self._factor.copy_(decision.factor)

    def launch(self, rules: Mapping[Rule, int], lanes: Iterable[tuple[Lane, Rule]]) -> None:
        factors: dict[torch.dtype, torch.Tensor] = {}
        for lane, rule in lanes:
            dtype = torch.promote_types(lane.master.dtype, torch.float32)
            if dtype not in factors:
                factors[dtype] = self._factor.to(dtype)
            step_lane(lane, rule, factors[dtype], self._dials[rules[rule]])


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


# torch's AdamW, Adam and SGD, run over flat slices of buckets instead of parameter by parameter.

#: Number of hooks that Weft registers around a step: one before and one after.
_OWN_HOOKS = 2
_ADAMS = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(slots=True, eq=False)
class _Entry:
    """One parameter's flat slice: its range in the bucket's shard, and views of its states by key."""

    slot: Slot
    piece: nn.Parameter
    group: int
    start: int
    end: int
    views: dict[str, torch.Tensor]
    count: int = 0


@dataclass(slots=True, eq=False)
class _OwnSlices:
    """The slices of one bucket in order, each with its index among all slices of the bucket, and flat states by key.

    is_all: True if the optimizer has all slices of the bucket on this rank.
    """

    bucket: Bucket
    entries: list[tuple[int, _Entry]]
    flat: dict[str, torch.Tensor]
    is_all: bool


class FlatStep:
    """Runs the step of a user's optimizer on this rank's slices of the flat buckets."""

    def __init__(self, adoption: SlotAdoption):
        self.adoption = adoption
        self._bound: object = None
        self._held: list[_OwnSlices] = []
        self._counters: list[tuple[torch.Tensor, list[_Entry], int]] = []  # with the version of the counts
        self._decision: StepDecision | None = None  # of a counted step that the device may have skipped
        self._recorded = RecordedSteps()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        return self.adoption.optimizer

    @property
    def accepts_decision(self) -> bool:
        """True if the device may decide whether to skip a step of this optimizer."""
        is_watched = num_step_hooks(self._optimizer) > _OWN_HOOKS
        return self.applies() or (not is_watched and leaves_steps_out(self._optimizer))

    def applies(self) -> bool:
        """Return True if `FlatStep` supports this optimizer with its current settings."""
        optimizer = self._optimizer
        if num_step_hooks(optimizer) > _OWN_HOOKS:  # the user registered hooks on its steps
            return False
        if not all(bucket.master.is_floating_point() for bucket in self._buckets()):
            return False
        if type(optimizer) in _ADAMS:
            unusual = ("amsgrad", "maximize", "differentiable", "capturable")
            numbers = ("lr", "weight_decay", "eps")
        elif type(optimizer) is torch.optim.SGD:
            unusual = ("dampening", "maximize", "differentiable")
            numbers = ("lr", "weight_decay", "momentum")
        else:
            return False
        return all(
            not any(group.get(key) for key in unusual)
            and all(isinstance(number, int | float) for number in (*map(group.get, numbers), *group.get("betas", ())))
            and group.get("eps", 1) > 0
            for group in optimizer.param_groups
        )

    @torch.no_grad()
    def taking(self, factor: float | StepDecision, recorder: Recorder | None = None) -> Callable[[Bucket], None]:
        """Begin a step. Return a function that steps the slices of one bucket; `taken` ends the step.

        factor: factor by which gradients are multiplied when they are read. recorder: recorder for steps that the
        device may skip, or None to disable recording. A recorded step updates all buckets in this call.
        """
        self._bind()
        by_bucket = {held.bucket: held for held in self._held}
        is_recorded = False
        if recorder is not None and isinstance(factor, StepDecision):
            self._recorded.take(
                *self._found(), lambda: chain.from_iterable(map(self._lanes, self._held)), factor, recorder
            )
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
        """Return the key of the step's recording, and the rules of its lanes with their indices."""
        rules: dict[Rule, int] = {}
        numbers: dict[tuple[int, int], int] = {}  # rule number by (group, step count)
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
        self._count(1)
        self._decision = factor if isinstance(factor, StepDecision) else None

    @torch.no_grad()
    def finalize(self) -> None:
        """Remove the last step from the counts if the device skipped it. Waits for the device's decision."""
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
        return list(dict.fromkeys(slot.bucket for slot in self.adoption.pieces))

    @torch.no_grad()
    def _bind(self) -> None:
        """Move the states of all slices into flat tensors, and read their step counts."""
        if self._bound is not self.adoption.pieces:
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
        self._bound, self._held, self._counters = self.adoption.pieces, [], []
        by_device: dict[torch.device, list[_Entry]] = {}
        for bucket in self._buckets():
            inside = sorted((slot for slot in bucket.slots if slot.is_in(bucket.own)), key=lambda slot: slot.start)
            entries: list[tuple[int, _Entry]] = []
            flat: dict[str, torch.Tensor] = {}
            for number, slot in enumerate(inside):
                piece = self.adoption.pieces.get(slot)
                if piece is None or id(piece) not in groups:
                    continue
                group = groups[id(piece)]
                start, end = (place - bucket.own.start for place in slot.inside(bucket.own))
                entry = _Entry(slot, piece, group, start, end, {})
                for key in _keys(self._optimizer, self._optimizer.param_groups[group]):
                    if key not in flat:
                        flat[key] = torch.zeros_like(bucket.master)
                    view = slot.view_in(flat[key], bucket.own)
                    assert view is not None
                    entry.views[key] = view
                entries.append((number, entry))
                if type(self._optimizer) in _ADAMS:
                    is_fused = self._optimizer.param_groups[group].get("fused")
                    by_device.setdefault(piece.device if is_fused else torch.device("cpu"), []).append(entry)
            self._held.append(_OwnSlices(bucket, entries, flat, len(entries) == len(inside)))
        for device, members in by_device.items():
            counter = torch.zeros(len(members), dtype=torch.float32, device=device)
            for entry, view in zip(members, counter.unbind(), strict=True):
                entry.views["step"] = view
            self._counters.append((counter, members, version_of(counter)))

    def _grouped(self) -> Iterator[tuple[int, nn.Parameter]]:
        for index, group in enumerate(self._optimizer.param_groups):
            yield from ((index, param) for param in group["params"])

    def _lanes(self, held: _OwnSlices) -> Iterator[tuple[Lane, Rule]]:
        """Yield (elements that are stepped together, their rule)."""
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
        for start, end, rule in self._flat_slices(held):
            states = tuple(flat[start:end] for flat in held.flat.values())
            rounded = None if weights is None else weights[start:end]
            yield Lane(bucket.master.detach()[start:end], grad[start:end], states, rounded), rule

    def _flat_slices(self, held: _OwnSlices) -> Iterator[tuple[int, int, Rule]]:
        """Yield start, end and rule of adjacent slices with the same rule."""
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
    """Replace a state with a view of flat memory with the same values, or zeros if there was no state."""
    value = state.get(key)
    if isinstance(value, torch.Tensor):
        view.copy_(value)
    else:
        view.fill_(0 if value is None else value)
    state[key] = view


def _keys(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    if type(optimizer) in _ADAMS:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] else ()


class FlatOptimizers:
    """User optimizers that ZeRO steps on flat slices, with a `FlatStep` for each."""

    def __init__(self, axes: AxisMap, device: torch.device):
        self._axes, self._device = axes, device
        self.steps: dict[torch.optim.Optimizer, FlatStep] = {}

    @property
    def adoptions(self) -> list[SlotAdoption]:
        return [step.adoption for step in self.steps.values()]

    def add(self, adoption: SlotAdoption) -> None:
        self._put(adoption)
        self.steps[adoption.optimizer] = FlatStep(adoption)

    def settled(self, optimizer: torch.optim.Optimizer) -> FlatStep:
        """Return the optimizer's `FlatStep`, after correcting step counts if the device skipped the last step."""
        step = self.steps[optimizer]
        step.finalize()
        undo_skipped_counts(optimizer)
        return step

    def local(self) -> Iterator[tuple[Slot, nn.Parameter]]:
        """Yield (slot, parameter that an optimizer holds for it) of this rank."""
        for adoption in self.adoptions:
            yield from adoption.pieces.items()

    def show_gradients(self) -> None:
        """Set `.grad` of this rank's slices to the gradient sums in the buckets."""
        for slot, param in self.local():
            bucket = slot.bucket
            if param is not slot.param:
                param.grad = slot.view_in(bucket.host.grad if bucket.host else shard_of(bucket), bucket.own)

    def drop_hosted_gradients(self) -> None:
        """Drop the gradients of slices in host memory, because `publish` reuses the memory for weights."""
        for slot, param in self.local():
            if slot.bucket.host is not None:
                param.grad = None

    def full_states(self, buckets: Sequence[Bucket]) -> list[dict[str, torch.Tensor]]:
        """Return copies of each optimizer's full states, before buckets are laid out again. All ranks must call it."""
        by_axes: dict[Axes, list[Bucket]] = {}
        for bucket in buckets:
            by_axes.setdefault(bucket.over, []).append(bucket)
        return [
            {
                name: tensor.clone()
                for axes, members in by_axes.items()
                for name, tensor in gather_states(adoption, members, axes.shard)
            }
            for adoption in self.adoptions
        ]

    def move(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Put the slices of a new bucket layout into all optimizers, and load their full states."""
        for adoption, saved in zip(self.adoptions, states, strict=True):
            self._put(adoption)
            load_states(adoption, saved)

    def _put(self, adoption: SlotAdoption) -> None:
        """Set an optimizer's slices, and register the locations of its sharded parameters."""
        adoption.put()
        names = adoption.needs_full()
        full = [(slot.name, param) for slot, param in adoption.pieces.items() if slot.name in names]
        join_sharded(adoption.optimizer, full, self._axes, self._device)
        located: list[tuple[nn.Parameter, PlacedPart]] = []
        for slot, piece in adoption.pieces.items():
            start = slot.inside(slot.bucket.own)[0] - slot.start
            part = self._axes.part_of(slot.name, slot.param)
            located.append((piece, PlacedPart(self._axes.saved_name(slot.name), part, start, piece.device)))
        register_param_locations(adoption.optimizer, located)
