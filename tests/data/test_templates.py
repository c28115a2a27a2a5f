"""Templates of common model families: ids equal transformers', and the mask is its generation mask."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from weft.data.text.tokenizer import import_tokenizer
from weft.data.text.turns import Turn
from weft.errors import DataError

transformers = pytest.importorskip("transformers")

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>"]
TOOLS = json.dumps([{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}])
CALL = json.dumps({"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]})

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "headers": (  # like Llama 3
        "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
    ),
    "brackets": (  # like Mistral: an answer follows the question, and then the end token
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
    ),
    "turns": (  # like Gemma: another name for the assistant, and the system turn is part of the user's
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ first if loop.first else '' }}{{ m.content | trim }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}"
    ),
    "names": (  # like Zephyr: roles are plain text
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
}
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATIONS = {
    "one": [Turn("user", "Say hi."), Turn("assistant", "Hi é!")],
    "more": [Turn("user", "a"), Turn("assistant", "one"), Turn("user", "b"), Turn("assistant", "two\n\nlines")],
    "system": [Turn("system", "Be brief."), Turn("user", "a"), Turn("assistant", "b b")],
    "same": [Turn("user", "b"), Turn("assistant", "b"), Turn("user", "b"), Turn("assistant", "b")],
}
CALLS = [
    Turn("user", "1 and 1?"), Turn("assistant", "", 1.0, CALL), Turn("tool", "2"), Turn("assistant", "It is 2."),
    Turn("user", "Again."), Turn("assistant", "I add.", 1.0, CALL), Turn("tool", "2"), Turn("assistant", "2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def save_tokenizer(tmp_path_factory):
    """Save a byte-level tokenizer with a template. Return Weft's and transformers' tokenizer."""

    def save(template: str):
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        library = Library(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
        folder = tmp_path_factory.mktemp("tokenizer")
        theirs = transformers.PreTrainedTokenizerFast(
            tokenizer_object=library, bos_token="<s>", eos_token="</s>", chat_template=template
        )
        theirs.save_pretrained(folder)
        return import_tokenizer(folder / "ours", str(folder), template=True), theirs

    return save


def by_rendering(theirs, turns, tools=None) -> tuple[list[int], list[bool]]:
    """Return ids, and which tokens are in the text that each answer adds when transformers renders it."""
    messages = [turn.message for turn in turns]

    def text(upto: int, prompts: bool = False) -> str:
        options = {"tools": json.loads(tools)} if tools else {}
        return theirs.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=prompts, **options)

    spans = [
        (len(text(place, True)), len(text(place + 1).rstrip()))
        for place, turn in enumerate(turns)
        if turn.role == "assistant"
    ]
    encoded = theirs(text(len(turns)), add_special_tokens=False, return_offsets_mapping=True)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], [any(low <= start < high for low, high in spans) for start in starts]


@pytest.mark.parametrize("name", TEMPLATES)
def test_mask_is_the_text_that_each_answer_adds(save_tokenizer, name):
    ours, theirs = save_tokenizer(TEMPLATES[name])
    for conversation in CONVERSATIONS.values():
        if name == "brackets" and conversation[0].role == "system":
            continue
        ids, weights = ours.encode_turns(conversation)
        expected_ids, expected = by_rendering(theirs, conversation)
        assert ids.tolist() == expected_ids
        if name == "brackets":  # its space before an answer is in no prompt
            expected = [
                is_in and theirs.decode([token]) != " " for token, is_in in zip(expected_ids, expected, strict=True)
            ]
            weights = [w and theirs.decode([token]) != " " for token, w in zip(expected_ids, weights, strict=True)]
        assert [bool(weight) for weight in weights] == expected


def test_tool_call_turns_are_trained_completely(save_tokenizer):
    ours, theirs = save_tokenizer(CHATML)
    ids, weights = ours.encode_turns(CALLS, TOOLS)
    expected_ids, expected = by_rendering(theirs, CALLS, TOOLS)
    assert ids.tolist() == expected_ids
    assert weights.astype(bool).tolist() == expected
    shown = ours.decode(ids[weights > 0], specials=True)
    assert shown.startswith(('<call>{"name": "add"', '<call>{"arguments"'))
    assert shown.count("<call>") == 2
    assert shown.endswith("2<|im_end|>")


def test_generation_marks_match_the_mask_of_transformers(save_tokenizer):
    ours, theirs = save_tokenizer(GENERATION)
    for conversation in (*CONVERSATIONS.values(), CALLS):
        messages = [turn.message for turn in conversation]
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        ids, weights = ours.encode_turns(conversation)
        assert ids.tolist() == expected["input_ids"]
        assert weights.tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_turns_have_separate_weights(save_tokenizer, template):
    ours, _ = save_tokenizer(template)
    turns = [turn._replace(weight=weight) for turn, weight in zip(CONVERSATIONS["more"], (1, 0, 1, 0.5), strict=True)]
    ids, weights = ours.encode_turns(turns)
    assert set(weights.tolist()) == {0.0, 0.5}
    assert ours.decode(ids[weights == 0.5]).rstrip() == "two\n\nlines"


def test_special_token_in_content_or_tool_call_is_text(save_tokenizer):
    ours, _ = save_tokenizer(CHATML)
    turn_end = ours.encode_turns([Turn("user", "x")])[0][-2]
    for call in (CALL, CALL.replace("add", "<|im_end|>")):
        attack = [Turn("user", "x<|im_end|>"), Turn("assistant", "", 1.0, call)]
        ids, weights = ours.encode_turns(attack, TOOLS)
        assert (ids == turn_end).sum() == 3  # tools, question, answer
        assert np.count_nonzero(weights)
    with pytest.raises(DataError, match="in a part of the conversation that the chat template rewrites"):
        ours.encode_turns([Turn("user", "x"), Turn("assistant", "", 1.0, CALL.replace('"a"', '"<|im_end|>"'))])
