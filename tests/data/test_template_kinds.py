"""Templates of the published kinds: trained is what the assistant writes, and nothing else."""

from __future__ import annotations

import json
import re

import pytest

from tests.data.chat_kinds import KINDS, LESS_SPECIAL, SPECIALS
from weft.data.text.chat_template import ChatTemplate, RefusedConversation
from weft.data.text.template_sandbox import Sandbox
from weft.data.text.turns import Turn

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
MARKS = {"B": "\u27e6", "E": "\u27e7"}


def call(arguments, name: str = "get", **more) -> str:
    one = {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": arguments}}
    return json.dumps({"tool_calls": [one], **more})


def said(content: str, **more) -> Turn:
    return Turn("assistant", content, 1.0, json.dumps(more) if more else "")


TOOL = json.dumps([{"type": "function", "function": {"name": "get", "parameters": {"properties": {"city": {}}}}}])
ASK, AGAIN = Turn("user", "what is 7?"), Turn("user", "Sure? <b>Really</b>")
RESULT = Turn("tool", '{"t": 17}', 1.0, json.dumps({"tool_call_id": "abcdefghi", "name": "get"}))
ROME = Turn("assistant", "", 1.0, call({"city": "Rome", "days": 3}))
CONVERSATIONS = {
    "one turn": [ASK, said("it is 7")],
    "two turns": [ASK, said("it is 7"), AGAIN, said("sure: 7!")],
    "three turns": [ASK, said("it is 7."), AGAIN, said("sure"), ASK, said("**still** 7")],
    "same texts": [Turn("user", "b"), said("b"), Turn("user", "b"), said("b"), Turn("user", "b"), said("b")],
    "signs": [ASK, said("?!"), AGAIN, said("\U0001f44d"), ASK, said("```\n<b>x</b>\n```")],
    "blanks": [Turn("user", " yes "), said("\n yes \n"), Turn("user", "yes"), said(" yes 1 ")],
    "empty": [ASK, said(""), AGAIN, said("assistant")],
    "empty last": [ASK, said("one"), AGAIN, said("")],
    "system": [Turn("system", "Be brief."), ASK, said("it is 7"), AGAIN, said("yes")],
    "answers first": [said("hello"), ASK, said("it is 7")],
    "thoughts in content": [ASK, said("<think>\nlet me see\n</think>\n\nit is 7")],
    "thoughts in contents": [
        ASK, said("<think>\nlet me see\n</think>\n\nit is 7"), AGAIN, said("<think>\nyes\n</think>\n\nsure 7"),
    ],
    "thoughts without an opening tag": [ASK, said("let me see\n</think>\n\nit is 7")],
    "thoughts in a field": [ASK, said("it is 7", reasoning_content="let me see")],
    "thoughts in fields": [ASK, said("it is 7", reasoning="let me see"), AGAIN, said("sure", thinking="again.")],
    "thoughts then none": [ASK, said("it is 7", reasoning_content="let me see"), AGAIN, said("sure")],
    "a call": [ASK, ROME],
    "a call and an answer": [ASK, ROME, RESULT, said("17 degrees")],
    "calls in two turns": [ASK, ROME, RESULT, said("17"), AGAIN, ROME, RESULT, said("it is 17.")],
    "two calls in a row": [ASK, ROME, RESULT, Turn("assistant", "", 1.0, call({"city": "Oslo"})), RESULT, said("17")],
    "a call without arguments": [ASK, Turn("assistant", "", 1.0, call({})), RESULT, said("17")],
    "a call of numbers": [ASK, Turn("assistant", "", 1.0, call({"n": 3, "ok": True, "x": None})), RESULT, said("17")],
    "a call with words": [ASK, Turn("assistant", "I look.", 1.0, call({"city": "Rome"})), RESULT, said("17")],
    "a call with thoughts": [
        ASK, Turn("assistant", "", 1.0, call({"city": "Rome"}, reasoning_content="look it up")), RESULT, said("17"),
    ],
    "a context turn": [ASK, said("no")._replace(weight=0.0), AGAIN, said("sure")],
}  # fmt: skip
#: What a kind leaves out by its nature, so that the turn is trained otherwise or not at all.
REFUSED = {
    "system": ("gemma", "mistral 0.1"),
    "answers first": ("llama 2", "mistral 0.1", "gemma"),
}
RENDERS_CALLS = ("llama 3.1", "mistral 3", "qwen 2.5", "qwen 3", "qwen 3.5", "deepseek r1", "channels", "glm")


def template(kind: str) -> ChatTemplate:
    less = LESS_SPECIAL.get(kind, ())
    return ChatTemplate({"chat_template": KINDS[kind], **NAMES}, [one for one in SPECIALS if one not in less])


def wanted(kind: str, ours: ChatTemplate, turns: list[Turn], tools: str) -> tuple[str, list[str]]:
    """The text, and what lies between the marks of the template, of trained turns."""
    variables = {**NAMES, **MARKS, "tools": json.loads(tools) if tools else None, "add_generation_prompt": False}
    marked = Sandbox(KINDS[kind]).render({**variables, "messages": ours._messages(turns)}, 10_000).text
    parts = re.findall("\u27e6(.*?)\u27e7", marked, re.DOTALL)
    weights = [turn.weight for turn in turns if turn.role == "assistant"]
    assert len(parts) == len(weights)
    return re.sub("[\u27e6\u27e7]", "", marked), [part for part, weight in zip(parts, weights, strict=True) if weight]


@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_is_what_the_assistant_writes(kind):
    ours = template(kind)
    wrong = []
    for name, turns in CONVERSATIONS.items():
        has_calls = any(turn.role == "tool" or "tool_calls" in turn.more for turn in turns)
        if (has_calls and kind not in RENDERS_CALLS) or (kind == "glm" and "empty" in name):
            continue
        tools = TOOL if has_calls else ""
        try:
            text, spans = ours.render(turns, tools)
        except RefusedConversation as error:
            if kind not in REFUSED.get(name, ()):
                wrong.append((name, str(error)))
            continue
        should, parts = wanted(kind, ours, turns, tools)
        found = [text[low:high] for low, high, _ in spans]
        if kind == "glm":  # a turn ends with the token that begins the next one
            found = [re.sub(r"<\|(user|observation)\|>$", "", one) for one in found]
        if text != should or found != parts:
            wrong.append((name, found, parts))
    assert not wrong
