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


def hflm_figures(folder: Path, tasks: list[str], task_folder: Path) -> dict:
    """Return the figures of lm-eval's own class for Hugging Face models."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)
    found = simple_evaluate(
        model=model, tasks=tasks, task_manager=TaskManager(include_path=str(task_folder)), bootstrap_iters=0
    )
    return {
        task: {key.removesuffix(",none"): value for key, value in figures.items() if isinstance(value, float)}
        for task, figures in found["results"].items()
    }


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "mamba", "gemma2"])
def test_figures_of_a_folder_equal_those_of_lm_eval_under_plans(family, tmp_path, capsys, monkeypatch):
    pytest.importorskip("lm_eval")
    from tests.inference.models import write_folder

    folder, draw = write_folder(tmp_path / family, family), random.Random(2)
    rows = [
        {
            "q": " ".join(draw.choices(WORDS, k=draw.randrange(1, 12))),
            "choices": draw.sample([*WORDS, "warp weft", "a", "b"], 4),
            "gold": draw.randrange(4),
            "text": " ".join(draw.choices(WORDS, k=draw.randrange(2, 60))),
        }
        for _ in range(30)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    head = f"dataset_path: json\ndataset_kwargs:\n  data_files: {{test: {tmp_path / 'rows.jsonl'}}}\n"
    head += "test_split: test\n"
    kinds = {
        "choose": "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: gold\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "read": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
        "write": "output_type: generate_until\ndoc_to_text: '{{q}}'\ndoc_to_target: '{{q}}'\n"
        "generation_kwargs: {until: ['e', ' '], max_gen_toks: 6, do_sample: false}\n"
        "metric_list: [{metric: exact_match}, {metric: bleu}]\n",
    }
    (tmp_path / "tasks").mkdir()
    for name, text in kinds.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n{head}{text}")
    names = list(kinds)
    wanted = hflm_figures(folder, names, tmp_path / "tasks")
    assert wanted["read"]["byte_perplexity"] > 1
    capsys.readouterr()
    for plan in ("", "tp=2", "dp_shard=2 zero=3"):
        words = ["eval", str(folder), "--tasks", ",".join(names), "--task-folder", str(tmp_path / "tasks")]
        assert main.run([*words, "--plan", plan, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["tasks"]
        for task, figures in wanted.items():
            for key, value in figures.items():
                if "stderr" not in key:
                    assert found[task][key] == pytest.approx(value, rel=1e-5), (plan, task, key)
