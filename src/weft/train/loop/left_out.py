"""Steps whose data a run passes over: the order of all other data stays, and so does every step's learning rate."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator

from weft.errors import ConfigError
from weft.train.folder import RunFolder

#: The file of a run folder that lists them.
LEFT_OUT = "left_out.json"


def steps_left_out(folder: RunFolder) -> frozenset[int]:
    """Return the steps that a run leaves out, counted from 1.

    Raises:
        ConfigError: for a damaged list.
    """
    if LEFT_OUT not in folder.texts and not (folder.path / LEFT_OUT).is_file():
        return frozenset()
    try:
        return frozenset(map(int, json.loads(folder.text(LEFT_OUT))["steps"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f'{folder.path / LEFT_OUT}: not a list of steps such as {{"steps": [7, 8]}}. '
            f"Correct it, or delete it to train on all data."
        ) from error


def leave_out(folder: RunFolder, steps: Collection[int]) -> None:
    """Add steps, counted from 1, to those that the run passes over from its next start on."""
    path = folder.path / LEFT_OUT
    known = steps_left_out(RunFolder(folder.path))
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps({"steps": sorted({*known, *steps})}) + "\n")
    os.replace(draft, path)


def stretches(start: int, end: int, left_out: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield (steps done before, steps done after) of each stretch without a gap.

    A last stretch whose steps are all left out is empty, so that a run always reaches its end.

    Args:
        start: steps done before the first stretch.
        end: steps done after the last one.
        left_out: steps to pass over, counted from 1.
    """
    first = start
    for step in sorted(one for one in left_out if start < one <= end):
        if step - 1 > first:
            yield first, step - 1
        first = step
    yield first, end
