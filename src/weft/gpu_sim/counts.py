"""What ran on the paper device, counted by line of Weft: kernels, bytes, waits of the host, copies, collectives."""

from __future__ import annotations

import re
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


#: The local variable of `Program` that says which line a kernel of a compiled graph comes from.
LINE_IN_GRAPH = "line_in_graph"
_FRAME = re.compile(r'File "(/[^"]+)", line (\d+)')


def line_in(trace: str | None) -> str:
    """As `line_of`, of a stack trace that torch.compile kept; empty where nothing of it is known."""
    other = ""
    for name, number in reversed(_FRAME.findall(trace or "")):
        if name.startswith(_WEFT):
            return f"{name[len(_WEFT) :]}:{number}"
        if not other and not name.startswith((_TORCH, sys.prefix, sys.base_prefix)):
            other = f"{Path(name).name}:{number}"
    return other


def line_of() -> str:
    """The innermost line of Weft that is being carried out, as "train/step.py:120"; else of the script that runs.

    On autograd's thread of a device stands no such line, unless Weft wrote the backward: "backward". Of a compiled
    graph it is the line that its kernel comes from, which `Program` keeps in a local variable.
    """
    frame: FrameType | None = sys._getframe(1)
    other = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_HERE):
            if found := frame.f_locals.get(LINE_IN_GRAPH):
                return found
        elif name.startswith(_WEFT):
            return f"{name[len(_WEFT) :]}:{frame.f_lineno}"
        elif not other and name.startswith("/") and not name.startswith((_TORCH, sys.prefix, sys.base_prefix)):
            other = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return other or "backward"


@dataclass(slots=True)
class OpCounts:
    """Counted since the device was opened, or since `OpCounts` was made anew.

    kernels: by operator, a graph as one; recorded: those that graphs launched; kernel_lines, line_bytes,
    line_seconds: by line. num_bytes: read and written by kernels. flops: of products and attention. syncs: waits of
    the host for the device, by what and line; a copy that blocks is one of them. behind: waits for what was launched
    before the counts were made, while the device has work. copies: between host and device, by way ("to device" or
    "to host"), "blocking" or "non-blocking", and line. collectives: of tensors on the device, by kind; formats: their
    tensors, by kind and number format.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    kernel_lines: Counter[str] = field(default_factory=Counter)
    line_bytes: Counter[str] = field(default_factory=Counter)
    line_seconds: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    flops: float = 0.0
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

    def kernel(self, name: str, num_bytes: int, flops: float, seconds: float) -> None:
        """A kernel is launched."""
        line = line_of()
        self.flops += flops
        self.line_seconds[line] += seconds  # pyright: ignore[reportArgumentType] - a Counter adds floats as well
        self.kernels[name] += 1
        self.kernel_lines[line] += 1
        self.line_bytes[line] += num_bytes
        self.num_bytes += num_bytes
