"""Going back to a checkpoint from before the trouble, and not for ever."""

from __future__ import annotations

import json
import os

from weft.checkpoint import list_checkpoints, set_aside, step_in_name
from weft.monitor.alerts import Wish
from weft.train.folder import RunFolder
from weft.train.loop import leave_out

#: How often a run went back to which step.
_COUNTS = "rolled_back.json"
#: The same steps give the same numbers: without other data one return is enough, with other data three are.
_MOST = {"roll_back": 1, "skip_data": 3}


def roll_back(folder: RunFolder, wish: Wish, step: int) -> int | None:
    """Set checkpoints since the trouble aside, and for skip_data leave its data out. On the first rank, after saves.

    Returns the step that the next start goes on from; None where there is no older checkpoint, or the run went back to
    it too often already: then nothing has changed.

    Args:
        folder: of the run.
        wish: roll_back or skip_data.
        step: the steps done.
    """
    since = min(wish.since or step, step)
    saved = [known for path in list_checkpoints(folder.checkpoints) if (known := step_in_name(path.name)) is not None]
    target = max((known for known in saved if known < since), default=None)
    counts = _counts(folder)
    if target is None or counts.get(str(target), 0) >= _MOST[wish.action]:
        return None
    set_aside(folder.checkpoints, lambda one: one.step > target)
    if wish.action == "skip_data":
        leave_out(folder, range(since, step + 1))
    draft = folder.path / f".{_COUNTS}.{os.getpid()}"
    draft.write_text(json.dumps({**counts, str(target): counts.get(str(target), 0) + 1}) + "\n")
    os.replace(draft, folder.path / _COUNTS)
    return target


def _counts(folder: RunFolder) -> dict[str, int]:
    try:
        return {str(step): int(count) for step, count in json.loads((folder.path / _COUNTS).read_text()).items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
