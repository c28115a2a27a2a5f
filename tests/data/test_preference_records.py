"""Preference records: parsed contents, and each reason why one cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.config.run_config import RunConfig
from weft.data.order.loader import build_batch, marked, view_answer, view_sample
from weft.data.order.stream import SampleStream
from weft.data.store.prepare import prepare_data
from weft.data.text.documents import read_document
from weft.data.text.records import Broken, Record
from weft.data.text.schema import Schema, detect_schema
from weft.data.text.source import find_files
from weft.data.token_files import SplitReader
from weft.errors import DataError
from weft.train.tasks.decoder_loss import token_cross_entropy

PAIR = Schema("preference", prompt="prompt", chosen="chosen", rejected="rejected", role="role", content="content")
VERDICT = Schema("feedback", prompt="prompt", completion="completion", label="label", role="role", content="content")
ASK = {"role": "user", "content": "q"}


def message(content: Any, role: str = "assistant") -> dict[str, Any]:
    return {"role": role, "content": content}


def read(schema: Schema, **value: Any):
    return read_document(Record("f.jsonl", 3, value), schema, 300)


@pytest.mark.parametrize(
    ("schema", "record", "reason"),
    [
        (PAIR, {"prompt": "q", "chosen": "a"}, "no rejected answer"),
        (PAIR, {"prompt": "q", "chosen": "a", "rejected": None}, "no rejected answer"),
        (PAIR, {"prompt": "q", "rejected": "a"}, "no chosen answer"),
        (PAIR, {"prompt": "q", "chosen": "a", "rejected": "  "}, "empty rejected answer"),
        (PAIR, {"prompt": "q", "chosen": [ASK, message("")], "rejected": [ASK, message("b")]}, "empty chosen answer"),
        (PAIR, {"chosen": [ASK], "rejected": [ASK, message("b")]}, "chosen does not end with the assistant's turn"),
        (PAIR, {"chosen": [message("x", "judge")], "rejected": [message("b")]}, "unknown role"),
        (PAIR, {"chosen": "a b", "rejected": [ASK, message("b")]}, "chosen and rejected are of different kinds"),
        (PAIR, {"chosen": 3, "rejected": "b"}, "messages are not a list"),
        (VERDICT, {"prompt": "q", "completion": "", "label": True}, "empty completion"),
        (VERDICT, {"prompt": "q", "label": True}, "no completion"),
        (VERDICT, {"prompt": "q", "completion": "a"}, "missing column"),
        (VERDICT, {"prompt": "q", "completion": "a", "label": "maybe"}, "a label is neither true nor false"),
        (Schema("messages", messages="m", role="role", content="content"),
         {"m": [ASK, {**message("a"), "weight": -1}]}, "a weight is not a number of at least 0"),
        (Schema("messages", messages="m", role="role", content="content", tools="tools"),
         {"m": [ASK, message("a")], "tools": "{"}, "tools are not JSON"),
    ],
)  # fmt: skip
def test_unusable_preferences_have_a_reason(schema, record, reason):
    assert read(schema, **record) == Broken.of("f.jsonl", 3, reason, record)


def test_context_is_the_common_prefix_of_both_answers():
    both = [[ASK, message("same"), message("more", "user"), message(answer)] for answer in ("good", "bad")]
    document = read(PAIR, chosen=both[0], rejected=both[1])
    for one, answer in ((document, "good"), (document.other, "bad")):
        assert [turn.content for turn in one.turns if turn.is_trained] == [answer]
    plain = read(PAIR, chosen="Human: q\nBot: yes it is", rejected="Human: q\nBot: yes no")
    assert (plain.prompt, plain.text, plain.other.text) == ("Human: q\nBot: yes", " it is", " no")
    prefixed = read(PAIR, prompt="q", chosen=[ASK, message("good")], rejected=[ASK, message("bad")])
    assert [turn.content for turn in prefixed.turns] == ["q", "good"]
    assert read(PAIR, prompt=[ASK], chosen="good", rejected="bad").turns == prefixed.turns
    assert read(PAIR, prompt="q", chosen=[message("good")], rejected=[message("bad")]).turns[1].is_trained
    assert read(PAIR, prompt="q", chosen="a", rejected="a").note == "with equal answers"


def config(tmp_path: Path, *rows: dict[str, Any], **data: Any) -> RunConfig:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return RunConfig.model_validate({
        "data": {"train": [{"path": str(path)}], "cache_dir": str(tmp_path / "c"), "holdout": 0.0, **data},
        "tokenizer": {"kind": "bytes"}, "train": {"seq_len": 32},
    })  # fmt: skip


def answers(prepared) -> list[str]:
    (source,) = prepared.train
    reader, found = SplitReader(source.folder, source.counts), []
    for start, end in zip(reader.offsets[:-1].tolist(), reader.offsets[1:].tolist(), strict=True):
        weights = source.counts.weight_table[reader.trained(start, end - start)].tolist()
        found.append(marked(view_answer(reader.tokens(start, end - start).tolist(), weights, prepared.tokenizer)))
    return found


def test_pairs_are_stored_adjacently(tmp_path):
    prepared = prepare_data(config(tmp_path, {"prompt": "q", "chosen": " a", "rejected": " b"}), preferences=True)
    assert answers(prepared) == ["[[q]] a<|endoftext|>", "[[q]]-1{ b<|endoftext|>}"]
    assert prepared.train[0].kind == "preference"
    assert "1 pair, " in prepared.summary[1]


def test_feedback_is_stored_with_its_sign(tmp_path):
    rows = [{"prompt": "q", "completion": " a", "label": label} for label in (True, False)]
    assert answers(prepare_data(config(tmp_path, *rows), preferences=True)) == [
        "[[q]] a<|endoftext|>", "[[q]]-1{ a<|endoftext|>}"
    ]  # fmt: skip


def test_broken_pair_is_named_by_file_and_line(tmp_path):
    rows = [{"prompt": "q", "chosen": " a", "rejected": " b"}, {"prompt": "q", "chosen": " a"}]
    with pytest.raises(DataError) as caught:
        prepare_data(config(tmp_path, *rows), preferences=True)
    assert str(caught.value).startswith(
        f"data.train.0.path={tmp_path}/rows.jsonl: 1 of 2 records are broken (1 no rejected answer), more than "
        f"data.max_bad_fraction=0.01 allows; the first is {tmp_path}/rows.jsonl:2. Repair them"
    )


def test_other_data_is_refused_with_the_required_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x"}))
    files = find_files(str(tmp_path / "a.jsonl"), "data.train.0")
    with pytest.raises(DataError, match=r"a pair of columns chosen and rejected was not found in .*a\.jsonl, whose"):
        detect_schema(files, "auto", {}, 1000, preferences=True)
    with pytest.raises(DataError, match=r"schema=text: task.name=prefer learns from preferences. Use schema=prefer"):
        detect_schema(files, "text", {}, 1000, preferences=True)
    with pytest.raises(DataError, match=r"schema=feedback: it is for preference training. Set task.name=prefer"):
        detect_schema(files, "feedback", {}, 1000)


def test_weights_of_turns_are_passed_to_the_batch(tmp_path):
    turns = [ASK, {**message("ab"), "weight": 0}, message("more", "user"), {**message("cd"), "weight": 0.5}]
    prepared = prepare_data(config(tmp_path, {"messages": turns}, packing="pad"))
    stream = SampleStream(prepared.train, seed=0, seq_len=96, packing="pad", borders=True)
    batch = build_batch(stream, range(1), 1)
    trained = batch["labels"] != -100
    assert batch["weights"][trained].tolist() == [0.5] * 3  # c, d and the end of the turn
    assert prepared.tokenizer.decode(batch["labels"][trained].tolist(), specials=True) == "cd<|im_end|>"
    assert not batch["weights"][~trained].any()
    logits = torch.randn(1, 96, 260, dtype=torch.float64)
    loss, number = token_cross_entropy(logits, batch)
    total, _ = token_cross_entropy(logits, {"labels": batch["labels"]})
    assert (loss.item(), number.item()) == (pytest.approx(0.5 * total.item()), 1.5)
    view = view_sample(stream.sample(0), prepared.tokenizer)
    assert "0.5{cd<|im_end|>}" in marked(view)


SYSTEM, OTHER = {"role": "system", "content": "brief"}, {"role": "user", "content": "and 3?"}


@pytest.mark.parametrize(
    ("prompt", "full", "roles"),
    [
        ([ASK], [ASK, message("a")], "ua"),
        ([SYSTEM, ASK], [SYSTEM, ASK, message("a")], "sua"),
        ([SYSTEM, ASK], [ASK, message("a")], "sua"),
        ([ASK], [SYSTEM, ASK, message("a")], "sua"),
        ([ASK, message("x"), OTHER], [ASK, message("x"), OTHER, message("a")], "uaua"),
        ([ASK, message("x"), OTHER], [OTHER, message("a")], "uaua"),
        ([SYSTEM], [ASK, message("a")], "sua"),
        ([ASK, message("x")], [OTHER, message("a")], "uaua"),
        ([ASK], [message("a")], "ua"),
    ],
)
def test_prompt_repeated_in_the_answer_is_used_once(prompt, full, roles):
    other = [*full[:-1], message("b")]
    pair = read(PAIR, prompt=prompt, chosen=full, rejected=other)
    verdict = read(VERDICT, prompt=prompt, completion=full, label=True)
    for document in (pair, pair.other, verdict):
        assert "".join(turn.role[0] for turn in document.turns) == roles
        assert [turn.is_trained for turn in document.turns] == [False] * (len(roles) - 1) + [True]
