"""Debts in checkpoints: what replicas rounded off of gradients and still owe, by name of the parameter."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.parallel.local_tensors import StateSource, Stretch

#: Between a parameter's name and whose the debt is: a replica's number, or the owner's of a part of the total.
MIDDLE = "/residual."


def replicas_in(source: StateSource) -> int:
    """Return how many replicas owe something in a checkpoint."""
    return len({name.rpartition(MIDDLE)[2] for name in source.entries} - {"owner"})


def read_owed(like: Stretch, source: StateSource, whose: tuple[str, ...] = ()) -> None:
    """Add to a stretch what was owed of its elements.

    Args:
        like: named `parameter/residual.anyone`; its memory is added to.
        source: the checkpoint's debts.
        whose: what to read; nothing: all of them together.
    """
    param = like.name.rpartition(MIDDLE)[0]
    for name in source.entries:
        owner, middle, one = name.rpartition(MIDDLE)
        if middle and owner == param and (not whose or one in whose):
            found = torch.empty_like(like.flat)
            replace(like, name=name, flat=found, home=None).fill(source)
            like.flat.add_(found)
