"""Writes one rank's list: counts the microbatches of each stage, so that a generator says only which stage is next."""

from __future__ import annotations

from collections import deque

from weft.spec.schedule.action import Action, Pair, Step


class Writer:
    """Appends actions; the n-th forward (or backward) of a stage is that of microbatch n.

    num_microbatches: actions of microbatches from here on are counted, but left out.
    """

    def __init__(self, num_microbatches: int):
        self.steps: list[Step] = []
        self._num_microbatches = num_microbatches
        self._forwards: dict[int, int] = {}
        self._backwards: dict[int, int] = {}
        self._held: deque[Action] = deque()  # weight gradients to be written later

    def num_forwards(self, stage: int) -> int:
        """Forwards written of this stage."""
        return self._forwards.get(stage, 0)

    def num_backwards(self, stage: int) -> int:
        """Backwards written of this stage, whole ones and of the input alone."""
        return self._backwards.get(stage, 0)

    def forward(self, stage: int) -> None:
        """F of the stage's next microbatch."""
        self._append(self._next_forward(stage))

    def backward(self, stage: int) -> None:
        """BW of the stage's next microbatch."""
        self._append(self._next_backward(stage, whole=True))

    def input_gradient(self, stage: int) -> None:
        """B of the stage's next microbatch; its W is held back."""
        action = self._next_backward(stage, whole=False)
        self._append(action)
        self._held.append(Action("W", stage, action.microbatch))

    def pair(self, forward_stage: int, backward_stage: int) -> None:
        """F on one stage beside BW on the other."""
        forward = self._next_forward(forward_stage)
        self.steps.append(Pair(forward, self._next_backward(backward_stage, whole=True)))

    def weight_gradient(self, stage: int | None = None) -> None:
        """The oldest W that is held back (of this stage); nothing where there is none."""
        for action in self._held:
            if stage is None or action.stage == stage:
                self._held.remove(action)
                self._append(action)
                return

    def weight_gradients(self, stage: int | None = None, *, but: int = 0) -> None:
        """Every W that is held back (of this stage), except for the last few."""
        held = sum(stage is None or action.stage == stage for action in self._held)
        for _ in range(held - but):
            self.weight_gradient(stage)

    def _next_forward(self, stage: int) -> Action:
        index = self.num_forwards(stage)
        self._forwards[stage] = index + 1
        return Action("F", stage, index)

    def _next_backward(self, stage: int, *, whole: bool) -> Action:
        index = self.num_backwards(stage)
        self._backwards[stage] = index + 1
        return Action("BW" if whole else "B", stage, index)

    def _append(self, action: Action) -> None:
        if action.microbatch < self._num_microbatches:
            self.steps.append(action)
