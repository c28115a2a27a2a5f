"""Planner descriptions of tasks on Hugging Face folders."""

from __future__ import annotations

import pytest

from tests.train.tuned_folders import save_tokenizer, write_tables
from weft.config.files import load_config
from weft.planner.search.question import Question
from weft.train.tasks.registry import find_task

transformers = pytest.importorskip("transformers")


def test_planner_uses_the_runs_sequence_length(tmp_path):
    """The model's maximum length would make planned steps four times as long."""
    entries = save_tokenizer(tmp_path / "bert", "bert")
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    transformers.BertConfig(vocab_size=entries + 960, max_position_embeddings=512, **layers).save_pretrained(
        tmp_path / "bert"
    )
    write_tables(tmp_path)
    words = ["task=masked_lm", f"model.path={tmp_path / 'bert'}", f"data.train={tmp_path / 'texts.jsonl'}"]
    config = load_config(None, [*words, "train.seq_len=128", "train.global_batch=8"]).config
    assert Question.of(find_task(config).describe(), "2xa100").job.seq_len == 128
