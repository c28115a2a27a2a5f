"""Reward models: rows of pairs, chats through the template, and refused records. Numbers: test_tuned_parity.py."""

from __future__ import annotations

import json

import pytest

from tests.train.tuned_folders import save_model
from weft.config.files import load_config
from weft.errors import ConfigError, DataError
from weft.train.preparation import prepare_run
from weft.train.tasks.registry import find_task

pytest.importorskip("transformers")
TEMPLATE = (
    "{% for message in messages %}{{ '[CLS]' + message['role'] + ' ' + message['content'] + '[SEP]' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[CLS]assistant ' }}{% endif %}"
)


@pytest.fixture
def task(tmp_path):
    save_model(tmp_path / "llama", "llama")
    file = tmp_path / "llama" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))

    def made(rows: list[dict], *words: str):
        (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = [f"model.path={tmp_path / 'llama'}", f"data.train={tmp_path / 'pairs.jsonl'}", "task=reward"]
        given += [f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path}", "data.holdout=0", "train.seq_len=32"]
        given += ["train.global_batch=2", "train.steps=2", "launch.device=cpu"]
        config = load_config(None, [*given, *words]).config
        folder = prepare_run(config, world_size=1)
        found = find_task(folder.config())
        found.open(folder)
        return found

    return made


def texts(task) -> list[list[str]]:
    tokenizer = task.network.tokenizer()
    kinds = ("input_ids.chosen", "input_ids.rejected")
    return [[tokenizer.decode(row[kind].tolist()) for kind in kinds] for row in task.tables.train]


def test_chats_use_the_template_and_texts_are_joined(task):
    asked = [{"role": "user", "content": "the cat"}]
    rows = [
        {"prompt": asked, "chosen": [{"role": "assistant", "content": "good"}],
         "rejected": [{"role": "assistant", "content": "bad"}]},
        {"chosen": [*asked, {"role": "assistant", "content": "good"}],
         "rejected": [*asked, {"role": "assistant", "content": "sad"}]},
        {"prompt": "the dog ", "chosen": "runs", "rejected": "sleeps"},
    ]  # fmt: skip
    first, second, third = texts(task(rows))
    assert "the cat" in first[0]
    assert first[0] != first[1]
    assert second[0] == first[0]
    assert "sad" in second[1]
    assert third == ["the dog runs", "the dog sleeps"]


@pytest.mark.parametrize(
    "row, text",
    [
        ({"prompt": "a ", "chosen": "good"}, "it has no column 'rejected'"),
        ({"prompt": "a ", "chosen": "good", "rejected": 3}, "record 1"),
        ({"prompt": "a ", "chosen": "good", "rejected": ""}, "record 1"),
    ],
)
def test_refused_records(task, row, text):
    with pytest.raises(DataError, match=text):
        task([row])


def test_refused_settings(task):
    with pytest.raises(ConfigError, match=r"task.options.center=-1: a weight is at least 0"):
        task([], "task.options.center=-1")
    with pytest.raises(ConfigError, match=r"adapter.rank=4: an adapter freezes the new head"):
        task([{"prompt": "a ", "chosen": "good", "rejected": "bad"}], "adapter.rank=4")
