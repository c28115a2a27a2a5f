"""What a step computes without gradients beside its own forward and backward: a reference, a teacher, a second look."""

from __future__ import annotations

from dataclasses import dataclass

from weft.planner.space.shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWork:
    """Forward passes over a step's sequences through which no gradient goes.

    own: by the trained model, such as with its adapter off. shape: of a second model that lies on the ranks as the plan
    says and never changes; None: there is none. other: passes of that one. whole_logits: the loss takes the logits of
    both models whole.
    """

    own: float = 0.0
    shape: Shape | None = None
    other: float = 0.0
    whole_logits: bool = False
