"""What a rank does in a pipeline: one action, or a forward and a backward of two microbatches side by side."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: F forward, B gradient of the input, W gradient of the weights, BW both gradients in one go.
Kind = Literal["F", "B", "W", "BW"]
KINDS: tuple[Kind, ...] = ("F", "B", "W", "BW")


class Action(NamedTuple):
    """One pass of one microbatch through one stage. Stages are counted from the embedding, over all ranks."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.microbatch}"


class Pair(NamedTuple):
    """A forward and a backward on two stages of one rank: the communication of one hides behind the other."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Step = Action | Pair


def parts(step: Step) -> tuple[Action, ...]:
    """Return the actions of a step, one or two."""
    return (step.forward, step.backward) if isinstance(step, Pair) else (step,)
