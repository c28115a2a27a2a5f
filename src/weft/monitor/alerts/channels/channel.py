"""Who hears of alerts: by mail, at a webhook, through apprise, or by a command."""

from __future__ import annotations

import json
import smtplib
import ssl
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import EmailMessage
from typing import Any

from weft.errors import MissingExtra
from weft.monitor.sinks import Poster, SinkTrouble, address_of, secret_of
from weft.spec.config import ChannelSection
from weft.units import parse_seconds


@dataclass(frozen=True, slots=True)
class AlertMessage:
    """What an alert says. title: one line. text: the whole. data: the same for programs."""

    title: str
    text: str
    data: Mapping[str, Any]


def send_message(channel: ChannelSection, message: AlertMessage) -> None:
    """Send a message over a channel.

    Raises:
        SinkTrouble: where it could not be sent now; the text holds no secret.
        WeftError: where a secret or a package is missing.
    """
    {"mail": _mail, "webhook": _webhook, "apprise": _apprise, "command": _command}[channel.kind](channel, message)


def _mail(channel: ChannelSection, message: AlertMessage) -> None:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = message.title, channel.sender, ", ".join(channel.to)
    mail.set_content(message.text)
    host, _, port = channel.server.rpartition(":")
    host, port = (host, int(port)) if port.isdigit() and host else (channel.server, 0)
    timeout_s = parse_seconds(channel.timeout)
    password = secret_of(channel.password, f"channel {channel.name}: password")
    try:
        if channel.security == "tls":
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                host, port or 465, timeout=timeout_s, context=ssl.create_default_context()
            )
        else:
            server = smtplib.SMTP(host, port or 25, timeout=timeout_s)
        with server:
            if channel.security == "starttls":
                server.starttls(context=ssl.create_default_context())
            if password is not None:
                server.login(channel.user, password)
            server.send_message(mail)
    except (OSError, smtplib.SMTPException) as error:
        # The server's words may repeat what it was sent.
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        code = getattr(error, "smtp_code", "")
        raise SinkTrouble(f"mail through {channel.server} failed ({f'{code} ' if code else ''}{reason})") from None


def _webhook(channel: ChannelSection, message: AlertMessage) -> None:
    assert channel.url is not None
    url = address_of(channel.url, f"channel {channel.name}: url")
    # Slack, Mattermost and many others show "text"; programs read the rest.
    body = {"text": f"{message.title}\n{message.text}", "title": message.title, **message.data}
    Poster(url, {}, parse_seconds(channel.timeout)).post("", body)


def _apprise(channel: ChannelSection, message: AlertMessage) -> None:
    try:
        import apprise
    except ImportError as error:
        raise MissingExtra("apprise", "apprise", "channel.kind=apprise") from error
    assert channel.url is not None
    url = address_of(channel.url, f"channel {channel.name}: url")
    speaker = apprise.Apprise()
    if not speaker.add(url):
        raise SinkTrouble("apprise does not know an address of this kind")
    if not speaker.notify(title=message.title, body=message.text):
        raise SinkTrouble("apprise could not send it")


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
