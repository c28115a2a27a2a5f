"""Counts of a simulated GPU by line of Weft: kernels, bytes, waits of the host, copies, collectives."""

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


#: Name of the local variable of `Program` with the source line of a compiled graph's kernel.
LINE_IN_GRAPH = "line_in_graph"
_FRAME = re.compile(r'File "(/[^"]+)", line (\d+)')


def line_in(trace: str | None) -> str:
    """Return the line of a stack trace that torch.compile stored, as `line_of` does, or "" if it has none."""
    other = ""
    for name, number in reversed(_FRAME.findall(trace or "")):
        if name.startswith(_WEFT):
            return f"{name[len(_WEFT) :]}:{number}"
        if not other and not name.startswith((_TORCH, sys.prefix, sys.base_prefix)):
            other = f"{Path(name).name}:{number}"
    return other


def line_of() -> str:
    """Return the innermost running line of Weft, such as "train/step.py:120", or else of the user's script.

    On autograd's device thread, which has no such line unless Weft wrote the backward, return "backward". In a compiled
    graph, return the source line of the kernel, which `Program` stores in a local variable.
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
    """Counts since this object was created.

    Attributes:
        kernels: launches by operator. A graph is one launch.
        recorded: kernels that graphs launched.
        kernel_lines, line_bytes, line_seconds: launches, bytes and seconds by line.
        num_bytes: bytes that kernels read and wrote.
        flops: FLOPs of matmuls and attention.
        syncs: waits of the host for the device by reason and line, including blocking copies.
        behind: waits for work that was launched before this object was created, while the device has other work.
        copies: copies between host and device by direction ("to device" or "to host"), "blocking" or "non-blocking",
            and line.
        collectives: collectives of device tensors by kind.
        formats: tensors of collectives by kind and dtype.
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
        """Count a wait of the host for the device."""
        (self.behind if is_behind else self.syncs)[f"{what} @ {line_of()}"] += 1

    def copy(self, way: str, blocking: bool) -> None:
        """Count a copy. `way` is "to device" or "to host"."""
        self.copies[f"{way}, {'blocking' if blocking else 'non-blocking'} @ {line_of()}"] += 1

    def kernel(self, name: str, num_bytes: int, flops: float, seconds: float) -> None:
        """Count a kernel launch."""
        line = line_of()
        self.flops += flops
        self.line_seconds[line] += seconds  # pyright: ignore[reportArgumentType] - a Counter adds floats as well
        self.kernels[name] += 1
        self.kernel_lines[line] += 1
        self.line_bytes[line] += num_bytes
        self.num_bytes += num_bytes
