"""Heads of Hugging Face folders compared with transformers: padding, class names, decoder start tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.tuned_folders import WORDS, save_tokenizer
from weft.config.files import load_config
from weft.data.table_data import TableRecord, label_id, settled_labels
from weft.errors import ConfigError, DataError
from weft.train.tasks.registry import find_task

transformers = pytest.importorskip("transformers")
HEAD = {0: "CONTRADICTION", 1: "Neutral-Claim", 2: "ENTAILMENT"}
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def prepared(folder: Path, task: str, *words: str):
    lines = [
        f"task={task}", f"model.path={folder}", f"data.train={folder / 'data.jsonl'}", "data.holdout=0",
        f"run.dir={folder / 'runs'}", f"data.cache_dir={folder / 'cache'}", "train.seq_len=32", "train.global_batch=4",
        "plan=dp_replicate=1", "launch.device=cpu", *words,
    ]  # fmt: skip
    from weft.train.preparation import prepare_run

    run = prepare_run(load_config(None, lines).config, world_size=1)
    found: Any = find_task(run.config())
    found.open(run)
    return found


def loaded(task):
    """Return the task's model with the weights of its folder."""
    from weft.train.weights.published_weights import fill_full

    shapes = task.shapes()
    model = task.build()
    fill_full(model, task.initial_weights(shapes))
    return model.eval()


@pytest.mark.parametrize("pad", [0, 7, -1])
def test_classification_uses_the_last_token_with_any_padding(tmp_path, pad):
    """The config's padding id is not the tokenizer's ([PAD], 0), so the head would use the last padding token."""
    entries = save_tokenizer(tmp_path, "llama")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=entries, **SMALL, num_key_value_heads=2, pad_token_id=pad, id2label=HEAD,
        label2id={name: index for index, name in HEAD.items()},
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    texts = [" ".join(WORDS[:number]) for number in (1, 9, 3, 20)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    names = list(HEAD.values())
    rows = [{"text": text, "label": names[place % 3].lower()} for place, text in enumerate(texts)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = prepared(tmp_path, "classify_text")
    assert task.model_changes()["id2label"] == HEAD
    samples = [task.samples("train")[place] for place in range(4)]
    batch = task.collate(samples)
    logits = task.forward(loaded(task), batch)
    for row, text in zip(logits, texts, strict=True):
        alone = model(**tokenizer(text, return_tensors="pt")).logits[0]
        torch.testing.assert_close(row, alone, rtol=1e-5, atol=1e-6)


def test_class_names_are_those_of_the_head():
    wanted = {"contradiction": 0, "neutral claim": 1, "entailment": 2}
    found = settled_labels("", wanted, HEAD)
    assert found["labels"] == [*HEAD.values()]
    assert {name: found["ids"][name] for name in wanted} == wanted
    assert settled_labels("", ["ENTAILMENT", "Contradiction"], HEAD)["labels"] == [*HEAD.values()]
    assert settled_labels("", ["0", "2"], HEAD)["ids"] == {"0": 0, "1": 1, "2": 2}
    with pytest.raises(
        ConfigError, match=r"data has the classes a, b, c, and the folder's head CONTRADICTION, .*new_head"
    ):
        settled_labels("", "abc", HEAD)
    assert settled_labels("c,b,a", "abc", HEAD)["labels"] == ["c", "b", "a"]
    assert settled_labels("", "abc", HEAD, new_head=True)["labels"] == ["a", "b", "c"]
    assert settled_labels("", "abcd", HEAD)["labels"] == ["a", "b", "c", "d"]
    # Classes without names, and classes that differ only in case.
    assert settled_labels("", ["x", "y"], {0: "LABEL_0", 1: "LABEL_1"})["labels"] == ["x", "y"]
    assert settled_labels("", ["A", "a"], {0: "a", 1: "A"})["ids"] == {"a": 0, "A": 1}
    record = TableRecord("f", 1, {})
    assert label_id(record, "ENTAILMENT ".strip().lower(), found["ids"]) == 2
    with pytest.raises(DataError, match="not one of the known labels"):
        label_id(record, "other", found["ids"])


@pytest.mark.parametrize("family", ["mbart", "bart", "t5", "plbart"])
def test_decoder_inputs_are_derived_from_labels_like_the_model(tmp_path, family):
    entries = save_tokenizer(tmp_path, "bart")
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0}  # fmt: skip
    configs = {
        "mbart": lambda: transformers.MBartConfig(vocab_size=entries, **sizes, **ids),
        "plbart": lambda: transformers.PLBartConfig(vocab_size=entries, **sizes, **ids),
        "bart": lambda: transformers.BartConfig(vocab_size=entries, **sizes, **ids, decoder_start_token_id=4),
        "t5": lambda: transformers.T5Config(
            vocab_size=entries, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0,
            pad_token_id=0, eos_token_id=3, decoder_start_token_id=5,
        ),
    }  # fmt: skip
    torch.manual_seed(2)
    model = transformers.AutoModelForSeq2SeqLM.from_config(configs[family]()).eval()
    model.save_pretrained(tmp_path)
    rows = [{"source": " ".join(WORDS[:n]), "target": " ".join(WORDS[n : 2 * n])} for n in (2, 5, 9, 3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = prepared(tmp_path, "seq2seq", "task.options.target_len=16")
    batch = task.collate([task.samples("train")[place] for place in range(4)])
    with torch.no_grad():
        loss, number = task.loss(task.forward(loaded(task), batch), batch)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        plain = model(**inputs).loss
    assert float(loss) / int(number) == pytest.approx(float(plain), rel=1e-5)
