"""How a rank tells people that it waits for another one."""

from __future__ import annotations

import sys
from typing import TextIO

from weft.comm import Watch
from weft.mesh import Mesh
from weft.monitor import Display
from weft.monitor.terminal import LastingStream
from weft.spec.config import RunConfig
from weft.train.folder import RunFolder
from weft.units import parse_seconds


def watched(folder: RunFolder, config: RunConfig, mesh: Mesh, voice: Voice, *, owns_process: bool) -> Watch:
    """Tells when this rank waits for another one for long."""
    return Watch(
        mesh,
        voice.tell,
        warn_after_s=parse_seconds(config.launch.warn_after),
        limit_s=parse_seconds(config.launch.timeout),
        limit_name=f"launch.timeout={config.launch.timeout}",
        where_stacks=f"{folder.logs}/rank_*.log",
        owns_process=owns_process,
    )


class Voice:
    """Where this rank tells people that it waits: above the display where it has one; and in its log."""

    def __init__(self, stream: TextIO):
        self._stream = LastingStream(stream)
        self.display: Display | None = None

    def tell(self, text: str) -> None:
        if self.display is not None:
            self.display.note(text)
        else:
            self._stream.write(f"weft: {text}\n")
            self._stream.flush()
        print(text, file=sys.stderr, flush=True)
