# ruff: noqa: E501
"""A downloaded chat template cannot hang a run or exhaust memory, and a refused conversation ends no run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from weft.data.text.chat_template import ChatTemplate, RefusedConversation
from weft.data.text.schema import detect_schema
from weft.data.text.source import find_files
from weft.data.text.tokenize import ReadLimits, tokenise_source
from weft.data.text.tokenizer import save_json_tokenizer
from weft.data.text.turns import Turn
from weft.errors import DataError

TURNS = [Turn("user", "q"), Turn("assistant", "a")]
MILLION = "{% set x = 'a' * 1000000 %}"
GROWS = "{%% set ns = namespace(x=%s) %%}{%% for i in range(60) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"
HOSTILE = [
    "{{ 9**(9**8) }}", "{{ 2**99999999999 }}", "{{ 'a' * 10**10 }}", "{{ [0] * 10**10 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ loop.index|string }}{% endfor %}{% endfor %}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    GROWS % ("'aaaa'", "ns.x + ns.x"), GROWS % ("'aaaa'", "ns.x ~ ns.x"), GROWS % ("[1]", "[ns.x, ns.x]"),
    GROWS % ("[1]", "{'a': ns.x, 'b': ns.x}"), GROWS % ("[1]", "dict(a=ns.x, b=ns.x)"), GROWS % ("9", "ns.x * ns.x"),
    GROWS % ("[[1]]", "ns.x|map('list')|list + ns.x"), "{{ '%099999999d' % 3 }}", "{{ '%*d' % (1000000000, 3) }}",
    "{{ '{:>9999999999}'.format('a') }}", "{{ '{:{}}'.format('a', 999999999) }}", "{{ 'a'.ljust(10**9) }}",
    "{{ 'a\\na'|indent(999999999) }}", "{{ [1]|tojson(indent=999999999) }}", MILLION + "{{ x|replace('a', x) }}",
    MILLION + "{{ x.replace('a', x) }}", MILLION + "{{ x.join(x) }}", MILLION + "{{ x.translate({97: x}) }}",
    MILLION + "{% macro g() %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endmacro %}{{ g()|length }}",
    MILLION + "{% for i in range(99999) %}{{ x }}{% endfor %}", MILLION + "{{ range(99999)|join(x) }}",
    MILLION + "{% set y = " + "+".join(["x"] * 2000) + " %}", "{{ range(99999)|map('string')|map('list')|sum(start=[]) }}",
    "{% include 'a' %}", "{{ ''.__class__.__mro__[1].__subclasses__()[0]() }}", "{% for m in messages %}", "{{ lipsum(9) }}",
    "{{ messages.append(1) }}",
]  # fmt: skip


@pytest.mark.parametrize("source", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_template_is_refused_within_seconds(source):
    began = time.process_time()
    with pytest.raises(DataError, match="tokenizer: its chat template"):
        ChatTemplate({"chat_template": source}, ["</s>"]).render(TURNS)
    assert time.process_time() - began < 10


def test_long_conversations_are_within_the_limits():
    source = (
        "{% for m in messages %}{% set content = m.content | trim %}<|{{ m.role }}|>{{ content.replace('\\n', '\\r\\n') }}"
        "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}</s>{% endfor %}"
    )
    turns = [Turn(role, "word\n" * 20) for _ in range(2000) for role in ("user", "assistant")]
    template = ChatTemplate({"chat_template": source}, ["</s>"])
    assert len(template.render(turns)[1]) == 2000
    text, spans = template.render([Turn("user", "x" * 3_000_000), Turn("assistant", "one\n" * 1_000_000)])
    assert len(text) > 6_000_000
    assert len(spans) == 1


INST = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.fixture
def tokenizer(tmp_path):
    def save(template: str):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        library = Library(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken("</s>", special=True)])
        chat = {"chat_template": template, "eos_token": "</s>"}
        return save_json_tokenizer(tmp_path / "tokenizer", "file", library.to_str(), "</s>", "</s>", chat)

    return save


def tokenise(tmp_path: Path, tokenizer, rows, *, preferences: bool = False, max_bad: float = 0.1):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = find_files(str(path), "data.train.0")
    schema = detect_schema(files, "auto", {}, 1000, preferences=preferences)
    folder = tmp_path / "out"
    folder.mkdir()
    limits = ReadLimits(0.0, 1000, max_bad)
    manifest = tokenise_source(files, schema, tokenizer, limits, folder, keep_quarantine=tmp_path / "kept.jsonl")
    return manifest, [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]


def chat(*roles: str) -> list[dict[str, str]]:
    return [{"role": role, "content": f"x {number}"} for number, role in enumerate(roles)]


def test_conversation_refused_by_the_template_is_quarantined(tmp_path, tokenizer):
    rows = [{"messages": chat("user", "assistant")} for _ in range(40)]
    rows[17] = {"messages": chat("assistant", "user", "assistant")}
    manifest, broken = tokenise(tmp_path, tokenizer(INST), rows)
    assert manifest.splits["train"].num_documents == 39
    assert manifest.broken == {"refused by the chat template: roles must alternate": 1}
    assert [(Path(one["file"]).name, one["number"]) for one in broken] == [("d.jsonl", 18)]


def test_pair_with_one_refused_answer_is_left_out(tmp_path, tokenizer):
    good = {"prompt": chat("user"), "chosen": chat("assistant"), "rejected": chat("assistant")}
    rows = [dict(good, prompt=[{"role": "user", "content": f"q {number}"}]) for number in range(30)]
    rows[3] = {**good, "rejected": chat("assistant", "assistant")}
    manifest, broken = tokenise(tmp_path, tokenizer(INST), rows, preferences=True)
    assert manifest.splits["train"].num_documents == 58
    assert [one["number"] for one in broken] == [4]


def test_too_many_refusals_end_the_run_with_the_templates_message(tmp_path, tokenizer):
    rows = [{"messages": chat("user", "user", "assistant")} for _ in range(40)]
    with pytest.raises(DataError, match=r"40 of 40 .*refused by the chat template: roles must alternate"):
        tokenise(tmp_path, tokenizer(INST), rows)


def test_omissions_of_a_template_are_counted(tmp_path, tokenizer):
    call = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
    calling = [chat("user")[0], {"role": "assistant", "content": "", "tool_calls": [call]}, *chat("user", "assistant")]
    thinking = [chat("user")[0], {"role": "assistant", "content": "a", "reasoning_content": "let me see"}]
    rows = [{"messages": thinking}, {"messages": thinking}, {"messages": calling, "tools": [{"name": "get"}]}]
    rows += [{"messages": chat("user", "assistant"), "tools": None}] * 9
    manifest, _ = tokenise(tmp_path, tokenizer(INST), rows)
    assert manifest.notes["whose reasoning the chat template leaves out"] == 2
    assert manifest.notes["whose tool calls the chat template leaves out"] == 1
    assert manifest.notes["whose tools the chat template leaves out"] == 1


def test_arguments_as_objects_and_as_text_are_rendered_equally():
    head = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    tail = "{% endfor %}</s>{% endfor %}"
    for body in (
        "{{ c.function.arguments | tojson }}", "{{ c.function.arguments }}", "{{ 'x' + c.function.arguments }}",
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}",
        "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
        "{{ c.function.arguments | tojson }}{% endif %}",
    ):  # fmt: skip
        template = ChatTemplate({"chat_template": head + body + tail}, ["</s>"])
        texts = []
        for arguments in ({"city": "Rome"}, '{"city":  "Rome"}'):
            more = json.dumps({"tool_calls": [{"function": {"name": "get", "arguments": arguments}}]})
            texts.append(template.render([Turn("user", "q"), Turn("assistant", "", 1.0, more)])[0])
        assert texts[0] == texts[1]
        assert 'city": "Rome"' in texts[0] or "city=Rome" in texts[0]
        assert "\\" not in texts[0]


def test_refusal_names_the_roles():
    with pytest.raises(
        RefusedConversation, match=r"refuses a conversation of assistant, user \(roles must alternate\)"
    ):
        ChatTemplate({"chat_template": INST}, []).render(TURNS[::-1])
