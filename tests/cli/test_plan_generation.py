"""`weft plan --for generate` and `--for grpo`: golden output, JSON, and refused words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inference.models import write_folder
from weft.cli.app import run
from weft.cli.planning.plan import NOTHING_FITS
from weft.planner.cost.generation import cache_growth

GENERATE = ["plan", "llama3-8b", "4xh100", "--for", "generate", "--prompt", "2000", "--new", "500", "--batch", "64"]
GOLDEN = Path(__file__).with_name("plan_generation.txt")


def test_table_and_details_equal_the_golden_file(capsys):
    assert run([*GENERATE, "--reasons"]) == 0
    found = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines()) + "\n"
    assert found == GOLDEN.read_text()


def test_json_has_each_figure(capsys):
    assert run([*GENERATE, "--json", "--top", "2", "--fix", "tp=2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["is_prediction"] is True
    assert found["question"]["prompt"] == 2000
    best, second = found["plans"]
    assert best["plan"] == "dp_replicate=2 tp=2 precision=bf16"
    assert "tp=2" in second["plan"]
    assert best["rows"] == 32
    whole = best["first_s"] + 499 * best["token_s"]
    assert best["generation_s"] == pytest.approx(whole)
    assert best["tokens_per_s"] == pytest.approx(64 * 500 / whole)
    assert best["prefill_share"] == pytest.approx(best["first_s"] / whole)
    assert sum(best["memory"].values()) == pytest.approx(best["total_bytes"])


def test_step_of_grpo_is_sampling_and_training(capsys):
    words = ["plan", "small", "4xa100", "--for", "grpo", "--prompt", "100", "--new", "200", "--batch", "16x8"]
    assert run([*words, "--fix", "pp=2", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["is_copied"] is True  # under pp each rank samples with a whole copy of the weights
    assert best["rows"] == 32
    assert best["total_s"] > best["generation_s"] > 0
    assert run([*words, "--fix", "zero=3"]) == 0
    out = capsys.readouterr().out
    assert " of sampling, " in out
    assert "each rank with a whole copy of the weights" in out
    assert run([*words, "--fix", "tp=2 cp=1 pp=1 zero=1", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert (best["is_copied"], best["rows"], best["waves"]) == (False, 64, 1)


def test_grpo_refuses_stages_without_memory_for_a_whole_copy(capsys):
    words = ["plan", "llama3-70b", "8x8xh100", "--for", "grpo", "--prompt", "100", "--new", "200", "--batch", "16x8"]
    assert run([*words, "--fix", "pp=8", "--reasons"]) == NOTHING_FITS
    assert "under pp, cp and sp, each rank needs 131 GiB for a whole copy" in capsys.readouterr().out


def test_folder_with_states_of_fixed_size_is_planned(tmp_path, capsys):
    """A family that is traced: one layer keeps a state of three tokens, the other keys and values of all."""
    folder = write_folder(tmp_path / "lfm2", "lfm2", layer_types=["conv", "full_attention"], block_ff_dim=64)
    config = json.loads((folder / "config.json").read_text())
    state = config["hidden_size"] * config["conv_L_cache"]
    keys = 2 * config["num_key_value_heads"] * config["hidden_size"] // config["num_attention_heads"]
    texts = ["--prompt", "20", "--new", "20", "--batch", "8"]
    assert run(["plan", str(folder), "1xh100", "--for", "generate", *texts, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    columns = cache_growth(20, 20, joined=False)[-1]
    assert best["memory"]["cache"] == 1.5 * 8 * 2 * (state + keys * columns)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--for", "serve"], "for=serve: it is generate or grpo."),
        (["--for", "generate", "--batch", "0"], "batch=0: a whole number from 1 to 10**6 is needed."),
        (["--for", "generate", "--batch", "8x8"], "batch=8x8: a whole number from 1 to 10**6 is needed."),
        (["--for", "grpo", "--batch", "8"], "batch=8: PROMPTSxCOMPLETIONS is needed. Use e.g. --batch 8x8."),
        (["--for", "generate", "--prompt", "0"], "prompt=0: a whole number from 1 to 10**7 is needed."),
        (["--for", "generate", "--new", "-1"], "new=-1: a whole number from 1 to 10**7 is needed."),
        (["--for", "generate", "--prompt", "9000"], "llama3-8b reads at most 8192 tokens, prompt and new ones"),
        (["--for", "generate", "--fix", "cp=2"], "cp=2: inference does not divide a text over ranks yet."),
        (["--for", "generate", "--fix", "zero=1"], "zero=1: generation has no gradients"),
        (["--for", "generate", "--fix", "sp=on"], "sp=on: generation does not use this field."),
        (["--for", "generate", "--fix", "tp=3"], "2 devices are no multiple of 3"),
        (["--for", "generate", "--tune", "lora"], "--tune: it belongs to plans for training."),
        (["--for", "generate", "--seq-len", "10"], "--seq-len: it belongs to plans for training."),
        (["--prompt", "10"], "--prompt: it belongs to plans for generation. Add --for generate"),
    ],
)
def test_wrong_words_are_refused_in_a_sentence(words, said, capsys):
    code = run(["plan", "llama3-8b", "2xh100", *words])
    captured = capsys.readouterr()
    assert code == 2
    assert said in captured.err
    assert "Traceback" not in captured.err


def test_nothing_fits(capsys):
    assert run(["plan", "llama3-405b", "1xrtx4090", "--for", "generate"]) == NOTHING_FITS
    out = capsys.readouterr().out
    assert "No plan fits llama3-405b on 1xrtx4090." in out
    assert "The smallest needs " in out


def test_models_without_texts_are_refused(tmp_path, capsys):
    code = "import torch\ndef net():\n    return torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.zeros(2, 4)\n"
    (tmp_path / "zoo_without_texts.py").write_text(code)
    sys.path.insert(0, str(tmp_path))
    try:
        assert run(["plan", "zoo_without_texts:net", "1xh100", "--for", "generate"]) == 2
    finally:
        sys.path.remove(str(tmp_path))
    assert "it is no causal language model, or the sizes of its cache are unknown" in capsys.readouterr().err


def test_plans_for_generation_import_no_torch():
    code = f"import sys; from weft.cli.app import run; run({GENERATE!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
