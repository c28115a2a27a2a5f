"""`weft eval`: results of lm-eval, and runs that cannot be evaluated."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from weft.cli import app as main

SMALL = ["model.dim=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_dim=64",
         "model.max_seq_len=96", "tokenizer.kind=bpe", "tokenizer.vocab_size=300", "launch.device=cpu", "eval.every=0",
         "sample.prompt=", "train.global_batch=4", "train.steps=20", "train.seq_len=32", "optimizer.lr=1e-2",
         "data.holdout=0.1", "launch.ranks=1", "schedule.warmup_steps=1"]  # fmt: skip
WORDS = ["warp", "weft", "loom", "thread", "cloth"]


def test_missing_lm_eval_error_names_its_extra(tmp_path, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main.run(["eval", str(tmp_path), "--tasks", "arc_easy"]) == 2
    assert "lm-eval" in capsys.readouterr().err


def test_missing_folder_or_tasks(tmp_path, capsys):
    assert main.run(["eval", str(tmp_path), "--tasks", " , "]) == 2
    assert "--tasks: it names no task." in capsys.readouterr().err
    assert main.run(["eval", str(tmp_path), "--tasks", "mine", "--task-folder", str(tmp_path / "no")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Create a run, and a task that asks for the next entry of a series."""
    here, draw = tmp_path_factory.mktemp("eval"), random.Random(1)
    texts = [" ".join(WORDS[(i * k) % 5] for k in range(1, 40)) for i in range(1, 61)]
    (here / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = [(k, " ".join(WORDS[k * j % 5] for j in range(1, 8))) for k in (draw.randrange(5) for _ in range(24))]
    asked = [{"q": text, "choices": WORDS, "gold": k * 8 % 5} for k, text in rows]
    (here / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    (here / "tasks").mkdir()
    (here / "tasks" / "next_word.yaml").write_text(
        f"task: next_word\ndataset_path: json\ndataset_kwargs:\n  data_files: {{test: {here / 'questions.jsonl'}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: gold\nmetric_list: [{metric: acc}]\n"
    )
    assert main.run(["train", *SMALL, f"data.train={here / 'texts.jsonl'}", f"run.dir={here}", "run.name=run"]) == 0
    return here


@pytest.mark.full
def test_results_equal_those_of_the_exported_model(home, capsys):
    pytest.importorskip("lm_eval")
    transformers = pytest.importorskip("transformers")
    import torch

    assert main.run(["eval", str(home / "run"), "--tasks", "next_wrd", "--task-folder", str(home / "tasks")]) == 2
    assert "Did you mean 'next_word'?" in capsys.readouterr().err
    words = ["eval", str(home / "run"), "--tasks", "next_word", "--task-folder", str(home / "tasks"), "--json"]
    assert main.run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert main.run(["export", str(home / "run"), str(home / "out")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "out")
    model, right = transformers.AutoModelForCausalLM.from_pretrained(home / "out").eval(), 0
    for line in (home / "questions.jsonl").read_text().splitlines():
        one, sums = json.loads(line), []
        start = len(tokenizer(one["q"])["input_ids"])
        for choice in one["choices"]:
            ids = torch.tensor([tokenizer(f"{one['q']} {choice}")["input_ids"]])
            with torch.no_grad():
                chances = model(ids).logits[0].log_softmax(-1)
            sums.append(float(chances[start - 1 : -1].gather(1, ids[0, start:, None]).sum()))
        right += sums.index(max(sums)) == one["gold"]
    assert found["step"] == 20
    assert found["tasks"]["next_word"]["acc"] == pytest.approx(right / 24)
    saved = json.loads((home / "run" / "evals" / "step_00000020.json").read_text())
    assert saved == found["tasks"]
    (home / "questions.jsonl").unlink()
    assert main.run(words) == 2
    assert "their data cannot be read" in capsys.readouterr().err
