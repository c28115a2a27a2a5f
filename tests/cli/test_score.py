"""`weft score`: figures of texts, completions and choices, and inputs that are refused before any computing."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.inference.models import plain_model, write_folder
from weft.cli import app as main

pytest.importorskip("transformers")

TEXTS = ["The warp is under tension. " * 4, "Weft!", "one two three"]
ROWS = [
    {"text": TEXTS[0]},
    {"prompt": "Q: 2+2?\nA: ", "choices": ["4", "5", "six"], "answer": 1},
    {"text": TEXTS[1]},
    {"prompt": "a loom ", "completion": "weaves"},
    {"prompt": "Q: 3+3?\nA:", "choices": [" 6", " seven"]},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    here = tmp_path_factory.mktemp("score")
    write_folder(here / "model", "llama")
    (here / "rows.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)) + "\n")
    return here


def plain_score(model, before: str, after: str, context: int = 64) -> float:
    """Return the log-likelihood of `after` in plain PyTorch, in windows that overlap by half of the context."""
    from tests.inference.models import library_tokenizer

    encode = library_tokenizer().encode
    prompt, scored = encode(before).ids or [256], encode(after).ids
    ids, at, found = torch.tensor([prompt + scored]), len(prompt), 0.0
    while at < ids.shape[1]:
        end = min(max(at + context // 2, context + 1 if at == len(prompt) else 0), ids.shape[1])
        part = ids[:, max(0, end - 1 - context) : end]
        with torch.no_grad():
            log_probs = model(part[:, :-1]).logits[0].log_softmax(-1)
        found += float(log_probs.gather(1, part[0, 1:, None])[at - end :].sum())
        at = end
    return found


@pytest.mark.parametrize("plan", ["", pytest.param("dp_shard=2 zero=3", marks=pytest.mark.full)])
def test_figures_of_each_kind_of_record(plan, home, capsys, tmp_path):
    words = ["score", str(home / "model"), "--data", str(home / "rows.jsonl"), "--plan", plan, "--json"]
    assert main.run([*words, "--out", str(tmp_path / "out.jsonl")]) == 0
    figures = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == [1, 3, 5, 7, 9]
    model = plain_model(home / "model").float()
    texts = [plain_score(model, "", text) for text in TEXTS[:2]]
    assert [lines[0]["log_likelihood"], lines[2]["log_likelihood"]] == pytest.approx(texts, rel=1e-5)
    assert lines[0]["tokens"] == len(TEXTS[0])
    assert lines[2]["perplexity"] == pytest.approx(math.exp(-texts[1] / 5), rel=1e-4)
    raw = [plain_score(model, "Q: 2+2?\nA: ", choice) for choice in ("4", "5", "six")]
    assert lines[1]["log_likelihoods"] == pytest.approx(raw, rel=1e-5)
    assert lines[1]["per_byte"] == pytest.approx([raw[0], raw[1], raw[2] / 3], rel=1e-5)
    assert (lines[1]["best"], lines[1]["answer"]) == (raw.index(max(raw)), 1)
    assert lines[3]["log_likelihood"] == pytest.approx(plain_score(model, "a loom ", "weaves"), rel=1e-5)
    assert not lines[3]["is_greedy"]
    of_texts, total, size = figures["texts"], sum(texts), sum(len(text) for text in TEXTS[:2])
    assert (of_texts["records"], of_texts["bytes"], of_texts["words"]) == (2, size, 21)
    assert of_texts["perplexity_per_word"] == pytest.approx(math.exp(-total / 21), rel=1e-3)
    assert of_texts["bits_per_byte"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    per_byte = [raw[0], raw[1], raw[2] / 3]
    assert figures["choices"] == {
        "records": 2, "answered": 1, "accuracy": float(raw.index(max(raw)) == 1),
        "accuracy_per_byte": float(per_byte.index(max(per_byte)) == 1),
    }  # fmt: skip


def test_context_and_stride_of_long_texts(home, capsys, tmp_path):
    words = ["score", str(home / "model"), "--data", str(home / "rows.jsonl"), "--out", str(tmp_path / "out")]
    model, found = plain_model(home / "model").float(), []
    for options in (["--context", "16"], ["--context", "16", "--stride", "16"], ["--context", "200"]):
        assert main.run([*words, *options]) == 0
        found.append(json.loads((tmp_path / "out").read_text().splitlines()[0])["log_likelihood"])
    assert found[0] == pytest.approx(plain_score(model, "", TEXTS[0], 16), rel=1e-5)
    assert found[1] != pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(plain_score(model, "", TEXTS[0]), rel=1e-5)  # the model's own limit
    assert "perplexity per token" in capsys.readouterr().out


BAD = [
    ("nope", "not JSON"),
    ("[1]", "not an object"),
    ('{"text": ""}', '"text": an empty text has no log-likelihood'),
    ('{"text": 3}', '"text": 3 is not text'),
    ('{"text": "a", "completion": "b"}', "its keys are 'text', 'completion'"),
    ('{"prompt": "a"}', "its keys are 'prompt'"),
    ('{"completion": "a"}', "its keys are 'completion'"),
    ('{"prompt": null, "completion": "a"}', '"prompt": null is not text'),
    ('{"prompt": "a", "choices": ["x"]}', '"choices": it must be a list of at least two texts'),
    ('{"prompt": "a", "choices": ["x", ""]}', '"choices": an empty text'),
    ('{"prompt": "a", "choices": ["x", "y"], "answer": 2}', '"answer": 2: it must be the index of one of 2 choices'),
    ('{"prompt": "a", "choices": ["x", "y"], "answer": true}', '"answer": true'),
    ('{"text": "\\ud800"}', "half of a surrogate pair"),
    ("[" * 100000, "it is nested too deep"),
]


@pytest.mark.parametrize("line, said", BAD)
def test_bad_record_is_named_with_its_line(line, said, home, capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text(f'{{"text": "good"}}\n\n{line}\n')
    assert main.run(["score", str(home / "model"), "--data", str(tmp_path / "bad.jsonl")]) == 2
    errors = capsys.readouterr().err
    assert f"{tmp_path}/bad.jsonl:3: " in errors.replace("\n  ", " ")
    assert said in errors.replace("\n  ", " ")


REFUSED = [
    (["--data", "none.jsonl"], "--data=none.jsonl: it cannot be read"),
    (["--data", "empty.jsonl"], "--data=empty.jsonl: it has no lines"),
    (["--no-windows"], "rows.jsonl:1: 108 tokens: the model reads 64"),
    (["--plan", "cp=2"], "cp=2: inference does not divide a text over ranks yet"),
    (["--plan", "tp=two"], "tp=two"),
    (["--dtype", "half"], "precision=half"),
    (["--device", "gpu"], "device=gpu: torch has no such device. Use auto, cpu, cuda"),
    (["--step", "3"], "which has no checkpoints"),
    (["--out", "none/out.jsonl"], "--out=none/out.jsonl: its folder does not exist"),
]


@pytest.mark.parametrize("options, said", REFUSED)
def test_refused_options(options, said, home, capsys, monkeypatch):
    monkeypatch.chdir(home)
    Path("empty.jsonl").write_text("\n\n")
    options = options if "--data" in options else ["--data", "rows.jsonl", *options]
    assert main.run(["score", "model", *options]) == 2
    assert said in capsys.readouterr().err.replace("\n  ", " ")


def test_ids_outside_the_vocabulary_and_weights_that_give_nan(capsys, tmp_path):
    folder = write_folder(tmp_path / "small", "llama", vocab_size=100, bos_token_id=1, eos_token_id=1, pad_token_id=1)
    (tmp_path / "one.jsonl").write_text('{"text": "~~"}\n')
    assert main.run(["score", str(folder), "--data", str(tmp_path / "one.jsonl")]) == 2
    assert "one.jsonl:1: token id 256: the model reads ids below 100" in capsys.readouterr().err.replace("\n  ", " ")
    import transformers

    folder = write_folder(tmp_path / "nan", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e38)
        model.model.norm.weight.mul_(1e4)
    model.save_pretrained(folder)
    assert main.run(["score", str(folder), "--data", str(tmp_path / "one.jsonl")]) == 2
    assert "one.jsonl:1: its log-likelihood is NaN" in capsys.readouterr().err.replace("\n  ", " ")
