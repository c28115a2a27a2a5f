"""Turns of conversations, and removal of nulls that a table added to tool calls and tool schemas.

A table (parquet, arrow) has the same columns in each row, at every depth. Arguments of different tools become one
struct with the keys of all tools, and a row has null for keys that it did not have. These nulls are dropped. Nulls of
the original data are kept if they can be distinguished: always in JSON text, and in objects if nothing indicates that a
table wrote the record.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from weft.data.text.answer_spans import REASONING_KEYS, has_unclear_thoughts, without_thoughts

#: Keys of a JSON schema whose value is data, in which null has a meaning.
_DATA_KEYS = ("default", "const", "example", "examples", "enum")
#: Keys whose objects are kept even if they become empty.
_KEPT_EMPTY = ("properties", "parameters", "arguments")


class Filled(NamedTuple):
    """Information about the nulls in a record.

    Attributes:
        by_table: whether a table added nulls to its objects.
        declared: names of the parameters of each tool in the record.
    """

    by_table: bool = False
    declared: Mapping[str, frozenset[str]] = {}


def filled_by_table(messages: Any) -> bool:
    """Return True if a message has null as its tool calls, which shows that a table wrote the messages."""
    if not isinstance(messages, list):
        return False
    return any(isinstance(one, dict) and "tool_calls" in one and one["tool_calls"] is None for one in messages)


def schema_filled_by_table(value: Any) -> bool:
    """Return True if a JSON schema has a null key, which shows that a table wrote it.

    Values that may be null, such as defaults, are not searched.
    """
    if isinstance(value, list):
        return any(map(schema_filled_by_table, value))
    if not isinstance(value, dict):
        return False
    return any(one is None or schema_filled_by_table(one) for key, one in value.items() if key not in _DATA_KEYS)


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that are null, at every depth.

    An object with only nulls becomes null, or {} if it is the value of `properties`, `parameters` or `arguments`.
    """
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, one in value.items():
        found = without_nulls(one)
        if found is None and isinstance(one, dict) and key in _KEPT_EMPTY:
            found = {}
        if found is not None:
            kept[key] = found
    return kept if kept or not value else None


def parameters_of(tools: list[dict[str, Any]]) -> dict[str, frozenset[str]]:
    """Return the names of the parameters of each tool that declares them."""
    found = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        parameters = function.get("parameters") if isinstance(function, dict) else None
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(function, dict) and isinstance(properties, dict):
            found[str(function.get("name"))] = frozenset(map(str, properties))
    return found


def _clean_call(call: Any, filled: Filled) -> Any:
    if not isinstance(call, dict):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        call["function"] = _clean_call(call["function"], filled)
    arguments = call.get("arguments")
    if isinstance(arguments, dict):
        declared = filled.declared.get(str(call.get("name")))
        if filled.by_table:
            call["arguments"] = without_nulls(arguments) or {}
        elif declared is not None:
            call["arguments"] = {key: value for key, value in arguments.items() if value is not None or key in declared}
    return call


# Messages of a record as turns, with normalized roles, contents as text, and the other fields that a template
# renders.

#: Role in the template for each role name in data sets. Only "assistant" is trained on.
ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "ai": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "chatbot": "assistant", "agent": "assistant", "llm": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool",
}  # fmt: skip
#: Role names that are rarely used for the assistant. A note informs the user.
_RARE_ASSISTANTS = ("bot", "model", "chatbot", "agent", "llm")
#: Keys of a message that chat templates use in addition to role and content.
_BESIDE = ("tool_calls", "tool_call_id", "name", "reasoning_content", "reasoning", "thinking")
#: Key of the weight of an assistant's turn in the loss.
_WEIGHT = "weight"
_MAX_WEIGHT = 1e30  # weights are stored as float32


class Unusable(Exception):
    """Raised inside the package with the reason why a record is invalid."""


class Turn(NamedTuple):
    """One message of a conversation.

    Attributes:
        role: role of the speaker.
        content: the text.
        weight: weight of its tokens in the loss if it is the assistant's turn. 0 for context only.
        more: JSON of other fields that a template may render, such as tool_calls, or "".
        masks_reasoning: the tokens of its reasoning are not trained.
    """

    role: str
    content: str
    weight: float = 1.0
    more: str = ""
    masks_reasoning: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """The message in the format of chat templates."""
        return {"role": self.role, "content": self.content, **(json.loads(self.more) if self.more else {})}

    @property
    def is_trained(self) -> bool:
        """True if its tokens count in the loss."""
        return self.role == "assistant" and self.weight != 0

    @property
    def is_empty(self) -> bool:
        """True if the turn has no text and no other field, such as tool calls or reasoning."""
        return not self.content.strip() and not self.more

    @property
    def has_reasoning(self) -> bool:
        """True if it is an assistant's turn with reasoning in the content or in another field."""
        return self.role == "assistant" and self.without_reasoning() != self

    def without_reasoning(self) -> Turn:
        """Return a copy without the reasoning in the content and in other fields."""
        more = json.loads(self.more) if self.more else {}
        kept = {key: value for key, value in more.items() if key not in REASONING_KEYS}
        return self._replace(content=without_thoughts(self.content), more=as_json(kept) if kept else "")

    def as_context(self) -> Turn:
        """Return a copy with weight 0, which is not trained."""
        return self._replace(weight=0.0)


def list_of_messages(value: Any) -> Any:
    """Return messages as a list. They may be stored as JSON text. Other values are returned unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def as_json(value: Any) -> str:
    """Return a value as JSON text.

    Raises:
        Unusable: if it has values that JSON cannot represent, such as dates or bytes of a table.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        raise Unusable("values that JSON does not have, such as dates or bytes") from None


def read_turns(messages: Any, role: str, content: str, filled: Filled | None = None) -> tuple[Turn, ...]:
    """Return the turns of a list of messages.

    Args:
        messages: the messages of a record.
        role: the key of a message's role.
        content: the key of its content.
        filled: information about nulls in tool calls.

    Raises:
        Unusable: if the messages are not a list, the list is empty, or a message is malformed.
    """
    messages = list_of_messages(messages)
    if not isinstance(messages, list):
        raise Unusable("messages are not a list")
    if not messages:
        raise Unusable("empty")
    filled = filled or Filled()
    filled = filled._replace(by_table=filled.by_table or filled_by_table(messages))
    return tuple(_turn(message, role, content, filled) for message in messages)


def apply_reasoning(turns: tuple[Turn, ...], reasoning: str) -> tuple[Turn, ...]:
    """Apply the option data.reasoning to the assistant's turns.

    Raises:
        Unusable: if reasoning must be found, and its tags do not pair or are in code.
    """
    if reasoning == "keep":
        return turns
    if any(turn.role == "assistant" and has_unclear_thoughts(turn.content) for turn in turns):
        raise Unusable("reasoning tags that do not pair or are in code")
    change = Turn.without_reasoning if reasoning == "drop" else lambda turn: turn._replace(masks_reasoning=True)
    return tuple(change(turn) if turn.role == "assistant" else turn for turn in turns)


def content_of_turns(turns: Sequence[Turn]) -> list[list[Any]]:
    """Return the content of a conversation as JSON values."""
    return [[*turn[:2]] if turn[2:4] == (1.0, "") else [*turn[:4]] for turn in turns]


def taken_for_assistant(messages: Any, role: str) -> str:
    """Return a note if a role that is read as "assistant" is rarely used for it, else ""."""
    roles = (str(message[role]).strip().lower() for message in list_of_messages(messages))
    return next((f"with role '{name}' read as assistant" for name in roles if name in _RARE_ASSISTANTS), "")


def _turn(message: Any, role_key: str, content_key: str, filled: Filled) -> Turn:
    if not isinstance(message, dict) or role_key not in message:
        raise Unusable("a message lacks its role or content")
    more = {key: message[key] for key in _BESIDE if key not in (role_key, content_key) and _says(message.get(key))}
    for key in set(REASONING_KEYS) & set(more):
        if isinstance(more[key], bool):  # a setting of the conversation
            del more[key]
        elif not isinstance(more[key], str):
            raise Unusable("reasoning is not text")
    if "tool_calls" in more:
        calls = list_of_messages(more["tool_calls"])
        more["tool_calls"] = [_clean_call(call, filled) for call in calls] if isinstance(calls, list) else calls
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
    return Turn(role, content, _weight(message), as_json(more) if more else "")


def _says(value: Any) -> bool:
    """Return True if a value of a message is not empty. Tables add empty values for keys of other rows."""
    return value is not None and value != [] and value != ""


def _weight(message: Mapping[str, Any]) -> float:
    weight = message.get(_WEIGHT)
    if weight is None:
        return 1.0
    if not isinstance(weight, int | float) or not 0 <= weight <= _MAX_WEIGHT:
        raise Unusable("a weight is not a number of at least 0")
    return float(weight)
