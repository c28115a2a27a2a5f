"""Forward with backward, and the optimizer's step, as recordings.

While a pass is recorded, autograd's hooks run as ever: gradients are copied into buckets, added to what is there, or
stay where autograd put them, and the kernels of all that are recorded. A replay runs the kernels alone, so what the
hooks left behind is put back after it. Nothing travels before a recorded pass is over.

A step reads what changes from step to step from memory: rates, numbers of steps, and what gradients are multiplied by.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from weft.errors import WeftWarning
from weft.memory.replay import Recorder, Recording, send_numbers
from weft.optim import AdamRule, Lane, SgdRule, StepDecision, step_lane
from weft.parallel.zero.flat.buckets import Bucket, Slot
from weft.parallel.zero.flat.reducer import Reducer

Rule = AdamRule | SgdRule
#: Recordings of the steps of one optimizer: gradients lie in other places for each shape of batches that is recorded.
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class PassEnd:
    """What a pass left: of each slot its gradient, its view into the bucket's and how often autograd delivered.

    buckets: of each, its whole gradients and whether they are collected there.
    """

    slots: tuple[tuple[torch.Tensor | None, torch.Tensor | None, int], ...]
    buckets: tuple[tuple[torch.Tensor | None, bool], ...]


class RecordedPasses:
    """The way of gradients, as recordings see it.

    recorder: of recordings; None: all is launched one by one. holds: nothing travels before the pass is over.
    """

    def __init__(self, slots: Sequence[Slot], reducer: Reducer):
        self.recorder: Recorder | None = None
        self.holds = False
        self._slots, self._reducer = slots, reducer

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Let the microbatch inside keep its gradients until it is over, and find all weights there."""
        self.holds = True
        try:
            yield
        finally:
            self.holds = False

    def found(self, last: bool) -> Hashable:
        """Return what a pass would find now; one that finds the same does the same."""
        return (
            tuple((slot.param.data_ptr(), _address(slot.param.grad), slot.expected) for slot in self._slots),
            tuple(self._found_of(bucket, last) for bucket in self._reducer.buckets),
        )

    def _found_of(self, bucket: Bucket, last: bool) -> Hashable:
        collects = bucket.collected or not self._reducer.stays(bucket, "last" if last else "inner")
        return bucket.collected, _address(bucket.grads) if collects else None

    def keeps(self, last: bool) -> bool:
        """Return whether what a pass leaves in its own memory is wanted after the next pass."""
        return not last and any(self._reducer.stays(bucket, "inner") for bucket in self._reducer.buckets)

    def left(self) -> PassEnd:
        """Return what the pass under way has left."""
        return PassEnd(
            tuple((slot.param.grad, slot.grad, slot.fired) for slot in self._slots),
            tuple((bucket.grads, bucket.collected) for bucket in self._reducer.buckets),
        )

    def leave(self, end: PassEnd) -> None:
        """Leave the same, after a replay."""
        for slot, (grad, view, fired) in zip(self._slots, end.slots, strict=True):
            slot.param.grad, slot.grad, slot.fired = grad, view, fired
        for bucket, (grads, collected) in zip(self._reducer.buckets, end.buckets, strict=True):
            bucket.grads, bucket.collected = grads, collected


class RecordedSteps:
    """The step of one optimizer, as recordings."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _RecordedStep] = {}
        self._once: dict[Hashable, _RecordedStep] = {}  # those that were taken once, and are not recorded yet
        self._has_said = False

    def take(
        self, found: Hashable, rules: Mapping[Rule, int], lanes: Callable[[], Iterable[tuple[Lane, Rule]]],
        decision: StepDecision, recorder: Recorder,
    ) -> None:  # fmt: skip
        """Step all lanes: by a replay where the same was recorded, and else one by one, or while recording.

        Args:
            found: where all lies, and what of the rules does not change from step to step.
            rules: of the lanes, numbered in their order.
            lanes: gives what is stepped together.
            decision: about this step.
            recorder: of recordings.
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
            step.launch(rules, lanes())  # one by one, which loads kernels too
            self._say(is_new)
        else:
            step.recording = recorder.record(lambda: step.launch(rules, lanes()), "the optimizer's step", apart=True)
            self._known[found] = step

    def _say(self, is_new: bool) -> None:
        if not is_new and not self._has_said:
            self._has_said = True
            warnings.warn(
                f"graphs=on: the optimizer's step is recorded {MOST_STEPS} times, for other settings than its rate or "
                "other places of gradients, and steps with still others are launched kernel by kernel.",
                WeftWarning,
                stacklevel=2,
            )


class _RecordedStep:
    """One recording, and the memory that it reads. decision, rules: of any step."""

    def __init__(self, decision: StepDecision, rules: Iterable[Rule]):
        self.recording: Recording[None] | None = None
        dials = torch.tensor([rule.dials for rule in rules], dtype=torch.float64)
        self._dials = torch.zeros_like(dials, device=decision.factor.device)
        self._factor = torch.zeros_like(decision.factor)

    def fill(self, rules: Iterable[Rule], decision: StepDecision) -> None:
        """Let the next launch or replay take this step."""
        send_numbers([rule.dials for rule in rules], self._dials)
        self._factor.copy_(decision.factor)

    def launch(self, rules: Mapping[Rule, int], lanes: Iterable[tuple[Lane, Rule]]) -> None:
        """Step lane by lane."""
        factors: dict[torch.dtype, torch.Tensor] = {}
        for lane, rule in lanes:
            dtype = torch.promote_types(lane.master.dtype, torch.float32)
            if dtype not in factors:
                factors[dtype] = self._factor.to(dtype)
            step_lane(lane, rule, factors[dtype], self._dials[rules[rule]])


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
