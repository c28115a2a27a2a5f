"""`weft ckpt prune`: which checkpoints stay beside the newest ones."""

from __future__ import annotations

from weft.checkpoint import load_checkpoint
from weft.checkpoint.targets import Location
from weft.cli.ckpt.which import settled_steps
from weft.errors import CheckpointError


def spared_steps(root: Location, every: int) -> set[int]:
    """Multiples of `every`, the newest step whose weights gave a finite loss, and the one with the best loss."""
    saved = settled_steps(root)
    spared = {step for step in saved if every and step % every == 0}
    states = {}
    for step, path in saved.items():
        try:
            states[step] = load_checkpoint(path, lazily=True).state
        except CheckpointError:
            continue  # damaged: nothing of it is worth keeping it for
    evaluated = [step for step, state in states.items() if state.get("evaluated")]
    progress = states[max(states)].get("progress") if states else None
    best = progress.get("best_step") if isinstance(progress, dict) else None
    return spared | set(evaluated[-1:]) | ({best} if isinstance(best, int) else set())
