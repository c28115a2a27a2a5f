"""Messages of a record as turns: roles by one name, contents as text, and what a template renders beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: Names of roles as data sets spell them -> the role in the template. Only "assistant" is trained on.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatbot": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
#: Of these, the ones that may as well be meant as something else: they are told.
_RARE_ASSISTANTS = ("bot", "model", "chatbot")
#: Keys of a message that chat templates know beside its role and content.
_BESIDE = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
#: How much an assistant's turn counts in the loss.
_WEIGHT = "weight"


class Unusable(Exception):
    """Carries the reason why a record is broken; never leaves this room."""


class Turn(NamedTuple):
    """One message. weight: of its tokens in the loss, if it is the assistant's; 0 is context.

    more: JSON of what a template may render beside role and content, such as tool_calls; "" is nothing.
    """

    role: str
    content: str
    weight: float = 1.0
    more: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """As a chat template takes it."""
        return {"role": self.role, "content": self.content, **(json.loads(self.more) if self.more else {})}

    @property
    def is_trained(self) -> bool:
        """Whether its tokens count in the loss."""
        return self.role == "assistant" and self.weight != 0

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing and calls nothing."""
        return not self.content.strip() and not self.more

    def as_context(self) -> Turn:
        """Return the same turn, not trained."""
        return self._replace(weight=0.0)


def read_turns(messages: Any, role: str, content: str) -> tuple[Turn, ...]:
    """Return the turns of a list of messages.

    Args:
        messages: as a record holds them.
        role: the key of a message's role.
        content: the key of its content.

    Raises:
        Unusable: for anything else.
    """
    if not isinstance(messages, list):
        raise Unusable("messages are not a list")
    if not messages:
        raise Unusable("empty")
    return tuple(_turn(message, role, content) for message in messages)


def content_of_turns(turns: Sequence[Turn]) -> list[list[Any]]:
    """Return what decides the content of a conversation, as JSON values."""
    return [[*turn[:2]] if turn[2:] == (1.0, "") else [*turn] for turn in turns]


def taken_for_assistant(messages: Sequence[Mapping[str, Any]], role: str) -> str:
    """Return a note about a role that only some data sets use for the answers, where it is trained on; else ""."""
    roles = (str(message[role]).strip().lower() for message in messages)
    return next((f"with role '{name}' read as assistant" for name in roles if name in _RARE_ASSISTANTS), "")


def _turn(message: Any, role_key: str, content_key: str) -> Turn:
    if not isinstance(message, dict) or role_key not in message:
        raise Unusable("a message lacks its role or content")
    more = {key: message[key] for key in _BESIDE if key not in (role_key, content_key) and _says(message.get(key))}
    if content_key not in message and "tool_calls" not in more:
        raise Unusable("a message lacks its role or content")
    role = ROLES.get(str(message[role_key]).strip().lower())
    if role is None:
        raise Unusable("unknown role")
    content = message.get(content_key)
    if content is None and "tool_calls" in more:
        content = ""
        if content_key in message:
            more = {"content": None, **more}
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    if not isinstance(content, str):
        raise Unusable("content is not text")
    return Turn(role, content, _weight(message), json.dumps(more, ensure_ascii=False) if more else "")


def _says(value: Any) -> bool:
    """Whether a key of a message says anything: tables fill up the keys that other rows have."""
    return value is not None and value != [] and value != ""


def _weight(message: Mapping[str, Any]) -> float:
    weight = message.get(_WEIGHT)
    if weight is None:
        return 1.0
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise Unusable("a weight is not a number of at least 0")
    return float(weight)
