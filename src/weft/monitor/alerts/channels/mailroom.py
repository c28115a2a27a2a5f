"""The thread that sends messages over one channel, tries again, and holds nothing up."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from weft.errors import WeftError
from weft.monitor.alerts.channels.channel import AlertMessage, send_message
from weft.monitor.sinks import SinkTrouble
from weft.spec.config import ChannelSection

#: Messages that wait at most; the oldest goes, and the next one says how many did.
_MOST_WAITING = 100
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 300.0
#: A message that could not be sent for so long (s) is news no more.
_TOO_OLD_S = 6 * 3600.0


class Mailroom(threading.Thread):
    """Sends over one channel.

    Args:
        channel: its table in the config.
        tell: takes a line for people: it cannot be reached.
        pause_s: first pause between tries.
    """

    def __init__(self, channel: ChannelSection, tell: Callable[[str], None], *, pause_s: float = _FIRST_PAUSE_S):
        super().__init__(name=f"weft-channel-{channel.name}", daemon=True)
        self._channel, self._tell, self._first_pause_s = channel, tell, pause_s
        self._waiting: deque[tuple[float, AlertMessage]] = deque()
        self._wake, self._end = threading.Event(), threading.Event()
        self._num_dropped = 0

    def put(self, message: AlertMessage) -> None:
        """Take a message; never waits."""
        self._waiting.append((time.monotonic(), message))
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._num_dropped += 1
        self._wake.set()

    def finish(self) -> None:
        """Send what is there, and end; the caller waits with `join` as long as it likes."""
        self._end.set()
        self._wake.set()

    def run(self) -> None:
        """Send until `finish`: the thread's own function."""
        pause_s, is_away = self._first_pause_s, False
        while self._waiting or not self._end.is_set():
            if not self._waiting:
                self._wake.wait(1.0)
                self._wake.clear()
                continue
            when, message = self._waiting[0]
            try:
                send_message(self._channel, self._with_dropped(message))
                self._num_dropped = 0
            except (SinkTrouble, WeftError) as trouble:
                if not is_away:
                    self._tell(f"channel {self._channel.name}: {trouble}. It is tried again")
                is_away = True
                if time.monotonic() - when < _TOO_OLD_S:
                    threading.Event().wait(pause_s)
                    pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                    continue
            except Exception as error:  # a channel that is wrong must not end its thread
                self._tell(f"channel {self._channel.name}: {type(error).__name__}; a message is lost")
            else:
                pause_s, is_away = self._first_pause_s, False
            if self._waiting and self._waiting[0][1] is message:
                self._waiting.popleft()

    def _with_dropped(self, message: AlertMessage) -> AlertMessage:
        if not self._num_dropped:
            return message
        text = f"{message.text}\n({self._num_dropped} earlier messages were dropped.)"
        return AlertMessage(message.title, text, message.data)
