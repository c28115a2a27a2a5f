"""Channels: mail, webhook, apprise and commands, and the threads that send over them."""

from __future__ import annotations

from weft.monitor.alerts.channels.channel import AlertMessage, send_message
from weft.monitor.alerts.channels.mailroom import Mailroom

__all__ = ["Mailroom", "AlertMessage", "send_message"]
