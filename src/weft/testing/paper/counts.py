"""What ran on the paper device, counted by line of Weft: kernels, bytes, waits of the host, copies, collectives."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

import weft

_WEFT = str(Path(weft.__file__).parent) + "/"
_HERE = str(Path(__file__).parent) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"


def line_of() -> str:
    """The innermost line of Weft that is being carried out, as "train/step.py:120"; else of the script that runs.

    On autograd's thread of a device stands no such line, unless Weft wrote the backward: "backward".
    """
    frame: FrameType | None = sys._getframe(1)
    other = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_WEFT):
            if not name.startswith(_HERE):
                return f"{name[len(_WEFT) :]}:{frame.f_lineno}"
        elif not other and name.startswith("/") and not name.startswith((_TORCH, sys.prefix, sys.base_prefix)):
            other = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "backward"


@dataclass(slots=True)
class OpCounts:
    """Counted since the device was opened, or since `OpCounts` was made anew.

    kernels: by operator, a graph as one; recorded: those that graphs launched; kernel_lines, line_bytes: by line.
    num_bytes: read and written by kernels. syncs: waits of the host for the device, by what and line; a copy that
    blocks is one of them. behind: waits for what was launched before
    the counts were made, while the device has work. copies: between host and device, by way ("to device" or "to host"),
    "blocking" or "non-blocking", and line. collectives: of tensors on the device, by kind; formats: their tensors, by
    kind and number format.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    kernel_lines: Counter[str] = field(default_factory=Counter)
    line_bytes: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    recorded: int = 0
    syncs: Counter[str] = field(default_factory=Counter)
    behind: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)

    def sync(self, what: str, is_behind: bool = False) -> None:
        """The host waits for the device."""
        (self.behind if is_behind else self.syncs)[f"{what} @ {line_of()}"] += 1

    def copy(self, way: str, blocking: bool) -> None:
        """way: "to device" or "to host"."""
        self.copies[f"{way}, {'blocking' if blocking else 'non-blocking'} @ {line_of()}"] += 1

    def kernel(self, name: str, num_bytes: int) -> None:
        """A kernel is launched."""
        line = line_of()
        self.kernels[name] += 1
        self.kernel_lines[line] += 1
        self.line_bytes[line] += num_bytes
        self.num_bytes += num_bytes
