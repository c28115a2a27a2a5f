"""Channels: mail, webhook, apprise and commands, and the threads that send over them."""

from __future__ import annotations

from weft.monitor.alerts.channels.channel import Message, send_message
from weft.monitor.alerts.channels.mailroom import Mailroom

__all__ = ["Mailroom", "Message", "send_message"]
