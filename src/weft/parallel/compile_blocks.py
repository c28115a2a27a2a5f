"""torch.compile on each repeated block of a model, and what of it stays uncompiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from weft.errors import WeftWarning
from weft.mesh import Mesh
from weft.models import MoE
from weft.parallel.dropout import FunctionalDropout
from weft.parallel.expert import SpreadExperts
from weft.parallel.private_torch import leave_side_effects_to_forward
from weft.structure import repeated_blocks


def compile_blocks(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each repeated block by itself: compile time stays flat in depth. Without blocks, the whole model.

    Blocks of one class share one graph. backend: torch.compile's.
    """
    # A recomputed block notes where it is in cut parts and dropout. Each forward begins that anew, and the replay is
    # in the compiled graph already, so it needs no notes.
    leave_side_effects_to_forward()
    for block in repeated_blocks(model).values() or [model]:
        block.compile(backend=backend)


def warn_of_uncompiled(model: nn.Module, mesh: Mesh, *, stacklevel: int) -> None:
    """Warn where blocks cannot be compiled: torch.compile takes a recomputed block whole or not at all."""
    plan = mesh.plan
    if plan.recompute_policy not in ("full", "selective") or mesh.rank:
        return
    kinds = {type(part) for block in repeated_blocks(model).values() for part in block.modules()}
    reasons = (
        (plan.cp > 1, "attention over cp"),
        (any(issubclass(kind, MoE | SpreadExperts) for kind in kinds), "experts"),
        (any(issubclass(kind, FunctionalDropout) for kind in kinds), "dropout inside of attention"),
    )
    if (reason := next((words for holds, words in reasons if holds), None)) is not None:
        warnings.warn(
            f"compile=on: blocks with {reason} run uncompiled where they recompute. "
            f"Use recompute=none to have them compiled in parts, or leave compile out.",
            WeftWarning,
            stacklevel=stacklevel + 1,
        )
