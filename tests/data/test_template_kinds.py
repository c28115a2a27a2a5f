"""Templates of published kinds: exactly the assistant's text is trained."""

from __future__ import annotations

import json
import re

import pytest

from tests.data.chat_kinds import KINDS, LESS_SPECIAL, SPECIALS
from weft.data.text.chat_template import ChatTemplate, RefusedConversation
from weft.data.text.template_sandbox import Sandbox
from weft.data.text.turns import Turn, Unusable, apply_reasoning, read_turns

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
MARKS = {"B": "\u27e6", "E": "\u27e7"}


def call(arguments, name: str = "get", **more) -> str:
    one = {"type": "function", "id": "abcdefghi", "function": {"name": name, "arguments": arguments}}
    return json.dumps({"tool_calls": [one], **more})


def reply(content: str, **more) -> Turn:
    return Turn("assistant", content, 1.0, json.dumps(more) if more else "")


TOOL = json.dumps([{"type": "function", "function": {"name": "get", "parameters": {"properties": {"city": {}}}}}])
ASK, AGAIN = Turn("user", "what is 7?"), Turn("user", "Sure? <b>Really</b>")
RESULT = Turn("tool", '{"t": 17}', 1.0, json.dumps({"tool_call_id": "abcdefghi", "name": "get"}))
ROME = Turn("assistant", "", 1.0, call({"city": "Rome", "days": 3}))
CONVERSATIONS = {
    "one turn": [ASK, reply("it is 7")],
    "two turns": [ASK, reply("it is 7"), AGAIN, reply("sure: 7!")],
    "three turns": [ASK, reply("it is 7."), AGAIN, reply("sure"), ASK, reply("**still** 7")],
    "same texts": [Turn("user", "b"), reply("b"), Turn("user", "b"), reply("b"), Turn("user", "b"), reply("b")],
    "signs": [ASK, reply("?!"), AGAIN, reply("\U0001f44d"), ASK, reply("```\n<b>x</b>\n```")],
    "blanks": [Turn("user", " yes "), reply("\n yes \n"), Turn("user", "yes"), reply(" yes 1 ")],
    "empty": [ASK, reply(""), AGAIN, reply("assistant")],
    "empty last": [ASK, reply("one"), AGAIN, reply("")],
    "system": [Turn("system", "Be brief."), ASK, reply("it is 7"), AGAIN, reply("yes")],
    "answers first": [reply("hello"), ASK, reply("it is 7")],
    "thoughts in content": [ASK, reply("<think>\nlet me see\n</think>\n\nit is 7")],
    "thoughts in contents": [
        ASK, reply("<think>\nlet me see\n</think>\n\nit is 7"), AGAIN, reply("<think>\nyes\n</think>\n\nsure 7"),
    ],
    "thoughts without an opening tag": [ASK, reply("let me see\n</think>\n\nit is 7")],
    "thoughts in a field": [ASK, reply("it is 7", reasoning_content="let me see")],
    "thoughts in fields": [ASK, reply("it is 7", reasoning="let me see"), AGAIN, reply("sure", thinking="again.")],
    "thoughts then none": [ASK, reply("it is 7", reasoning_content="let me see"), AGAIN, reply("sure")],
    "a call": [ASK, ROME],
    "a call and an answer": [ASK, ROME, RESULT, reply("17 degrees")],
    "calls in two turns": [ASK, ROME, RESULT, reply("17"), AGAIN, ROME, RESULT, reply("it is 17.")],
    "two calls in a row": [ASK, ROME, RESULT, Turn("assistant", "", 1.0, call({"city": "Oslo"})), RESULT, reply("17")],
    "a call without arguments": [ASK, Turn("assistant", "", 1.0, call({})), RESULT, reply("17")],
    "a call of numbers": [ASK, Turn("assistant", "", 1.0, call({"n": 3, "ok": True, "x": None})), RESULT, reply("17")],
    "a call with words": [ASK, Turn("assistant", "I look.", 1.0, call({"city": "Rome"})), RESULT, reply("17")],
    "a call with thoughts": [
        ASK, Turn("assistant", "", 1.0, call({"city": "Rome"}, reasoning_content="look it up")), RESULT, reply("17"),
    ],
    "a context turn": [ASK, reply("no")._replace(weight=0.0), AGAIN, reply("sure")],
}  # fmt: skip
#: Differences of a kind by design: the turn is trained differently or not at all.
REFUSED = {
    "answers first": ("llama 2", "mistral 0.1", "gemma"),
}
#: Kinds without a system role, and one that renders it only before the last question.
WITHOUT_SYSTEM = ("gemma", "mistral 0.1", "mistral 3")
RENDERS_CALLS = ("llama 3.1", "mistral 3", "qwen 2.5", "qwen 3", "qwen 3.5", "deepseek r1", "channels", "glm")


def template(kind: str) -> ChatTemplate:
    less = LESS_SPECIAL.get(kind, ())
    return ChatTemplate({"chat_template": KINDS[kind], **NAMES}, [one for one in SPECIALS if one not in less])


def expected(kind: str, ours: ChatTemplate, turns: list[Turn], tools: str) -> tuple[str, list[str]]:
    """Return the text, and the parts between the template's markers in trained turns."""
    variables = {**NAMES, **MARKS, "tools": json.loads(tools) if tools else None, "add_generation_prompt": False}
    marked = Sandbox(KINDS[kind]).render({**variables, "messages": ours._messages(ours._supported(turns))}, 10_000).text
    parts = re.findall("\u27e6(.*?)\u27e7", marked, re.DOTALL)
    weights = [turn.weight for turn in turns if turn.role == "assistant"]
    assert len(parts) == len(weights)
    return re.sub("[\u27e6\u27e7]", "", marked), [part for part, weight in zip(parts, weights, strict=True) if weight]


@pytest.mark.parametrize("kind", KINDS)
def test_system_message_joins_the_first_user_message_without_a_system_role(kind):
    ours, turns = template(kind), CONVERSATIONS["system"]
    joined = [Turn("user", "Be brief.\n\nwhat is 7?"), *turns[2:]]
    text, spans = ours.render(turns)
    assert "Be brief." in text
    assert (ours.render(joined) == (text, spans)) == (kind in WITHOUT_SYSTEM)
    assert any("first user message" in note for note in ours.left_out) == (kind in WITHOUT_SYSTEM)
    assert (ours.prompt(turns[:2]) == ours.prompt(joined[:1])) == (kind in WITHOUT_SYSTEM)
    if kind in WITHOUT_SYSTEM:
        alone = ours.render([turns[0], reply("yes")])
        assert alone == ours.render([Turn("user", "Be brief."), reply("yes")])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if "thoughts" in name])
def test_masked_reasoning_is_the_only_untrained_text_of_an_answer(name, kind):
    ours, turns = template(kind), CONVERSATIONS[name]
    if "call" in name and kind not in RENDERS_CALLS:
        return
    tools = TOOL if "call" in name else ""
    text, spans = ours.render(turns, tools)
    masked, left = ours.render(apply_reasoning(tuple(turns), "mask"), tools)
    assert masked == text
    trained, full = "".join(text[low:high] for low, high, _ in left), "".join(text[low:high] for low, high, _ in spans)
    thoughts = (
        ("let me see", "again.", "look it up", "yes") if "contents" in name else ("let me see", "again.", "look it up")
    )
    without = full
    for thought in thoughts:
        without = without.replace(thought, "")
    assert trained == without


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_reasoning_is_not_rendered(kind):
    ours = template(kind)
    for name in ("thoughts in content", "thoughts without an opening tag", "thoughts in a field", "thoughts in fields"):
        turns = CONVERSATIONS[name]
        plain = [
            turn if turn.role == "user" else reply(re.sub(r"(?s).*</think>\s*", "", turn.content)) for turn in turns
        ]
        assert ours.render(apply_reasoning(tuple(turns), "drop")) == ours.render(plain), name


def test_reasoning_of_several_parts_is_masked_or_dropped():
    thought = "<think>(one, two).\n\n<b>x</b></think> first. <thinking>3</thinking>\nsecond"
    turns = (ASK, reply(thought), AGAIN, reply("<think></think>yes", reasoning="no <i>tag</i>!"))
    dropped = apply_reasoning(turns, "drop")
    assert [turn.content for turn in dropped] == ["what is 7?", "first. second", AGAIN.content, "yes"]
    assert dropped[3].more == ""
    text, spans = template("chatml").render(apply_reasoning(turns, "mask"))
    trained = "".join(text[low:high] for low, high, _ in spans)
    assert not any(part in trained for part in ("one", "two", "3", "x", "no", "tag"))
    assert all(part in trained for part in ("<think>", "</think> first. <thinking></thinking>\nsecond"))


@pytest.mark.parametrize("how", ["mask", "drop"])
@pytest.mark.parametrize(
    "content",
    [
        "<think>and so",
        "<think>1 <think>2</think> 3</think> it is 7",
        "<think>1</think> 2</think> it is 7",
        "sure <think>1 <thinking>2</think> 3</thinking> it is 7",
        "Write `</think>` at the end.",
        "So:\n```\n<think>plan</think>\n```\n",
    ],
)
def test_reasoning_whose_borders_are_unclear_is_refused(content, how):
    with pytest.raises(Unusable, match="do not pair or are in code"):
        apply_reasoning((ASK, reply(content)), how)
    assert apply_reasoning((ASK, reply(content)), "keep")[1].content == content


@pytest.mark.parametrize(
    "tags",
    ["<Think> </Think>", "<seed:think> </seed:think>", "<thoughts> </thoughts>", "[THINK] [/THINK]", "◁think▷ ◁/think▷",
     "<|begin_of_thought|> <|end_of_thought|>", "<|START_THINKING|> <|END_THINKING|>"],
)  # fmt: skip
def test_tags_of_other_models_are_reasoning(tags):
    first, end = tags.split()
    turns = (ASK, reply(f"{first}one{end}{first}two{end} it is 7"))
    text, spans = template("chatml").render(apply_reasoning(turns, "mask"))
    trained = "".join(text[low:high] for low, high, _ in spans)
    assert trained == f"{first}{end}{first}{end} it is 7<|im_end|>"
    assert apply_reasoning(turns, "drop")[1].content == "it is 7"


def chat(text: str) -> ChatTemplate:
    return ChatTemplate({"chat_template": text, **NAMES}, SPECIALS)


def test_masked_reasoning_that_the_template_changes_is_refused():
    ours = chat("{% for m in messages %}{{ m.role }}: {{ m.content | replace('let', 'may') }}</s>{% endfor %}")
    for thought in ("hm, let me see", "<b></b>"):
        turns = (ASK, reply(f"<think>{thought}</think>it is 7"))
        with pytest.raises(RefusedConversation, match="mask cannot find"):
            ours.render(apply_reasoning(turns, "mask"))
        assert ours.render(turns)[1]


def test_reasoning_in_a_field_is_text():
    def one(value):
        return read_turns([{"role": "assistant", "content": "7", "thinking": value}], "role", "content")[0]

    assert one(True).more == one(False).more == ""
    with pytest.raises(Unusable, match="reasoning is not text"):
        one({"text": "let me see"})


def test_a_result_inside_an_answer_is_refused():
    """Gemma 4 writes the words of a message with a call after the call's results, in one turn of the model."""
    ours = chat(
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>"
        "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.city }}<result>{{ messages[loop.index0 + 2].content }}</result>{% endfor %}"
        "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(RefusedConversation, match="interrupts answers"):
        ours.render(CONVERSATIONS["a call with words"], TOOL)
    text, spans = ours.render([*CONVERSATIONS["a call"], RESULT], TOOL)
    assert all("17" not in text[low:high] for low, high, _ in spans)


def test_a_prompt_that_the_system_message_explains_is_not_the_start_of_an_answer():
    ours = chat(
        "<|im_start|>system\nAnswers begin with <answer>.<|im_end|>{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not m.tool_calls %}<answer>{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}<|im_end|>"
        "{% endfor %}{% if messages[-1].role != 'assistant' %}<|im_start|>assistant\n{% endif %}"
    )
    text, spans = ours.render(CONVERSATIONS["a call and an answer"], TOOL)
    trained = [text[low:high].strip() for low, high, _ in spans]
    assert trained == ['{"city": "Rome", "days": 3}<|im_end|>', "17 degrees<|im_end|>"]


def test_messages_that_a_template_leaves_out_are_refused_or_counted():
    parts = chat(
        "{% for m in messages %}{{ m.role }}:{% generation %}{% if m.content is not string %}{{ m.content }}{% endif %}"
        "</s>{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(RefusedConversation, match="leaves out"):
        parts.render(CONVERSATIONS["one turn"])
    first = chat(
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    first.render([ASK, reply("it is 7"), Turn("system", "Be brief."), AGAIN, reply("sure")])
    assert first.left_out == {"with a message of the user, a tool or the system that the chat template leaves out": 1}


@pytest.mark.parametrize("kind", WITHOUT_SYSTEM)
def test_blank_and_several_system_messages_join_the_first_user_message(kind):
    ours, brief, rest = template(kind), Turn("system", "Be brief."), CONVERSATIONS["two turns"]
    assert ours.render([Turn("system", " \n"), *rest]) == ours.render(rest)
    assert not ours.left_out
    joined = ours.render([Turn("user", "Be brief.\n\nYes.\n\nwhat is 7?"), *rest[1:]])
    assert ours.render([brief, Turn("system", ""), Turn("system", "Yes."), *rest]) == joined
    assert ours.render([brief, Turn("user", ""), *rest[1:]]) == ours.render([Turn("user", "Be brief."), *rest[1:]])


@pytest.mark.parametrize("kind", KINDS)
def test_mask_is_the_assistants_text(kind):
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
        should, parts = expected(kind, ours, turns, tools)
        found = [text[low:high] for low, high, _ in spans]
        if kind == "glm":  # a turn ends with the token that begins the next one
            found = [re.sub(r"<\|(user|observation)\|>$", "", one) for one in found]
        if text != should or found != parts:
            wrong.append((name, found, parts))
    assert not wrong
