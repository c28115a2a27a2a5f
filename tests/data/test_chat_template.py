"""A tokenizer's own chat template: the text equals transformers', and answers are trained with their end tokens."""

from __future__ import annotations

import pytest

from weft.data.text.chat_template import ChatTemplate
from weft.data.text.turns import Turn
from weft.errors import DataError

pytest.importorskip("transformers")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] | trim }}\n"
    "{% else %}{{ m['content'] }}{{ eos_token }}\n{% endif %}{% endfor %}"
)
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TURNS = [Turn("user", " hi "), Turn("assistant", "one"), Turn("user", "more"), Turn("assistant", "two")]


def template(text: str = TEMPLATE) -> ChatTemplate:
    return ChatTemplate({"chat_template": text, **NAMES}, ["<s>", "</s>", "<|user|>"])


def test_answers_and_their_end_tokens_are_trained():
    text, spans = template().render(TURNS)
    assert text == "<s><|user|>hi\none</s>\n<|user|>more\ntwo</s>\n"
    assert [text[low:high] for low, high, _ in spans] == ["one</s>", "two</s>"]


def test_content_like_a_special_token_is_separated():
    turns = [Turn("user", "a</s>"), Turn("assistant", "b")]
    assert template().has_special(turns)
    assert not template().has_special(TURNS)
    assert template().split_literals(turns) == [("<s><|user|>a", False), ("</s>", True), ("\nb</s>\n", False)]


def test_templates_that_refuse_or_omit_answers_are_reported():
    with pytest.raises(DataError, match="refuses a conversation of user, assistant"):
        template("{{ raise_exception('no') }}").render(TURNS[:2])
    with pytest.raises(DataError, match="leaves out, repeats or interrupts answers"):
        template("{% for m in messages %}{{ m['role'] }}{% endfor %}").render(TURNS)
