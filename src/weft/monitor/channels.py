"""Channels for alerts: mail, webhook, apprise or a command."""

from __future__ import annotations

import json
import logging
import smtplib
import socket
import ssl
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from email.message import EmailMessage
from typing import Any

from weft.config.sections import ChannelSection
from weft.errors import MissingExtra, WeftError
from weft.monitor.sinks.base import Poster, SinkTrouble, address_of, one_line, secret_of
from weft.monitor.sinks.request_limit import OpenSockets, OutOfTime, within
from weft.units import parse_seconds


@dataclass(frozen=True, slots=True)
class AlertMessage:
    """Message of an alert: `title` is one line, `text` the full text, and `data` the content as JSON values."""

    title: str
    text: str
    data: Mapping[str, Any]


def send_message(channel: ChannelSection, message: AlertMessage) -> None:
    """Send a message over a channel.

    Raises:
        SinkTrouble: if it could not be sent now. The text contains no secret.
        WeftError: if a secret or a package is missing.
    """
    if channel.kind == "webhook":
        assert channel.url is not None
        # Slack, Mattermost and many other services show "text". Programs read the other fields.
        body = {"text": f"{message.title}\n{message.text}", "title": message.title, **message.data}
        Poster(channel.url, {}, parse_seconds(channel.timeout), f"channel {channel.name}: url").post("", body)
    else:
        {"mail": _mail, "apprise": _apprise, "command": _command}[channel.kind](channel, message)


def _mail(channel: ChannelSection, message: AlertMessage) -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"] = one_line(message.title), one_line(channel.sender)
    mail["To"] = one_line(", ".join(channel.to))
    mail.set_content(message.text.encode(errors="replace").decode())
    host, _, port = channel.server.rpartition(":")
    host, port = (host, int(port)) if port.isdigit() and host else (channel.server, 0)
    timeout_s = parse_seconds(channel.timeout)
    password = secret_of(channel.password, f"channel {channel.name}: password")
    opened = OpenSockets()

    def send() -> None:
        with _Mail(opened, host, port, timeout_s, tls=channel.security == "tls") as server:
            if channel.security == "starttls":
                server.starttls(context=ssl.create_default_context())
                if server.sock is not None:
                    opened.add(server.sock)
            if password is not None:
                server.login(channel.user, password)
            server.send_message(mail)

    try:
        within(timeout_s, send, opened.end)
    except OutOfTime:
        raise SinkTrouble(f"mail through {channel.server} failed (not sent within {channel.timeout})") from None
    except (OSError, smtplib.SMTPException) as error:
        # The server's reply may repeat the message, so it is not quoted.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        code = getattr(error, "smtp_code", "")
        raise SinkTrouble(f"mail through {channel.server} failed ({f'{code} ' if code else ''}{reason})") from None


class _Mail(smtplib.SMTP):
    """An SMTP connection that registers its socket, so that another thread can close it."""

    def __init__(self, opened: OpenSockets, host: str, port: int, timeout_s: float, *, tls: bool):
        self._opened, self._tls = opened, tls
        self._host = host  # smtplib reads it for the name in a certificate
        super().__init__(host, port or (465 if tls else 25), timeout=timeout_s)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        found = socket.create_connection((host, port), timeout)
        self._opened.add(found)
        if self._tls:
            found = ssl.create_default_context().wrap_socket(found, server_hostname=host, do_handshake_on_connect=False)
            self._opened.add(found)
            found.do_handshake()
        return found


def _apprise(channel: ChannelSection, message: AlertMessage) -> None:
    try:
        import apprise
    except ImportError as error:
        raise MissingExtra("apprise", "apprise", "channel.kind=apprise") from error
    assert channel.url is not None
    url = address_of(channel.url, f"channel {channel.name}: url")
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its log lines contain secret addresses

    def send() -> None:
        speaker = apprise.Apprise()
        if not speaker.add(url):
            raise SinkTrouble("apprise does not support this kind of address")
        if not speaker.notify(title=one_line(message.title), body=message.text):
            raise SinkTrouble("apprise could not send it")

    try:
        within(parse_seconds(channel.timeout), send)
    except OutOfTime:
        raise SinkTrouble(f"apprise did not send it within {channel.timeout}") from None


def _command(channel: ChannelSection, message: AlertMessage) -> None:
    body = json.dumps({"title": message.title, "text": message.text, **message.data}).encode()
    try:
        done = subprocess.run(
            list(channel.command), input=body, timeout=parse_seconds(channel.timeout), check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        reason = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise SinkTrouble(f"command {channel.command[0]} failed ({reason})") from None
    if done.returncode:
        raise SinkTrouble(f"command {channel.command[0]} ended with exit code {done.returncode}")


# A thread that sends the messages of one channel and retries, without blocking the caller.

#: Maximum number of queued messages. The oldest is dropped, and the next one reports how many were.
_MOST_WAITING = 100
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 300.0
#: A message that could not be sent for this long (s) is dropped.
_TOO_OLD_S = 6 * 3600.0


class NotificationSender(threading.Thread):
    """Thread that sends messages over one channel, and retries each for up to 6 hours.

    Args:
        channel: the channel's table in the config.
        notify: called with a line for the user if the channel cannot be reached, or if a message is lost by an error.
        pause_s: first pause (s) between retries.
    """

    def __init__(self, channel: ChannelSection, notify: Callable[[str], None], *, pause_s: float = _FIRST_PAUSE_S):
        super().__init__(name=f"weft-channel-{channel.name}", daemon=True)
        self._channel, self._notify, self._first_pause_s = channel, notify, pause_s
        self._waiting: deque[tuple[float, AlertMessage]] = deque()
        self._wake, self._end = threading.Event(), threading.Event()
        self._num_dropped = 0

    def put(self, message: AlertMessage) -> None:
        """Add a message to the queue without waiting. If the queue is full, its oldest message is dropped."""
        self._waiting.append((time.monotonic(), message))
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popleft()
            self._num_dropped += 1
        self._wake.set()

    def finish(self) -> None:
        """Stop after sending the queued messages. The caller waits with `join`."""
        self._end.set()
        self._wake.set()

    def run(self) -> None:
        """Send messages, with retries, until all are sent after `finish`. This is the thread's main function."""
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
                    self._notify(f"channel {self._channel.name}: {trouble}. It is tried again")
                is_away = True
                if time.monotonic() - when < _TOO_OLD_S:
                    threading.Event().wait(pause_s)
                    pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                    continue
            except Exception as error:  # errors of a channel must not end its thread
                self._notify(f"channel {self._channel.name}: {type(error).__name__}; a message is lost")
            else:
                pause_s, is_away = self._first_pause_s, False
            if self._waiting and self._waiting[0][1] is message:
                self._waiting.popleft()

    def _with_dropped(self, message: AlertMessage) -> AlertMessage:
        more = f"\n({self._num_dropped} earlier messages were dropped.)" if self._num_dropped else ""
        return replace(message, text=message.text + more)
