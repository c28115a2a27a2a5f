"""The command that the user typed, as words, for lines that say what to type next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

#: Programs that start a Python file as ranks, and the module that torchrun is.
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


def typed_command(argv: Sequence[str] | None = None, parent: Sequence[str] | None = None) -> list[str]:
    """Return this process's command line as a person types it; of a rank of torchrun, torchrun's.

    argv: of this process; parent: the command line of the process that started it. By default both are looked up.
    A rank cannot know the srun command that started it, so this is the rank's own command.
    """
    argv = sys.argv if argv is None else argv
    if parent is None:
        parent = _parent()
    for place, word in enumerate(parent):
        if word in _TORCHRUN or Path(word).name == "torchrun":
            launcher = ["torchrun"] if Path(word).name == "torchrun" else ["python", "-m", word]
            return [*launcher, *parent[place + 1 :]]
    name = Path(argv[0]).name
    program = ["python", "-m", "weft"] if name == "__main__.py" else [name]
    return [*program, *argv[1:]]


def _parent() -> list[str]:
    import psutil

    try:
        found = psutil.Process().parent()
        return found.cmdline() if found is not None else []
    except psutil.Error:
        return []  # Not ours to look at, or gone.
