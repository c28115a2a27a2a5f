"""How a rank tells people that it waits for another one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from weft.monitor.screen import Display, LastingStream


class Voice:
    """Where this rank tells people that it waits: above the display where it has one; and in its log."""

    def __init__(self, stream: TextIO):
        self._stream = LastingStream(stream)
        self.display: Display | None = None
        #: On the first rank, takes events while it trains.
        self.log: Callable[[Mapping[str, object]], None] | None = None

    def record(self, event: Mapping[str, object]) -> None:
        """Write an event, where this rank has a log now."""
        if self.log is not None:
            self.log(event)

    def tell(self, text: str) -> None:
        """Show a line."""
        if self.display is not None:
            self.display.note(text)
        else:
            self._stream.write(f"weft: {text}\n")
            self._stream.flush()
        print(text, file=sys.stderr, flush=True)
