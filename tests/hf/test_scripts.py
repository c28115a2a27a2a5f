"""Scripts of transformers and TRL under plans, after a change of two lines, equal themselves on one device."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from safetensors.torch import load_file

from tests.hf import cases, trl_cases

pytestmark = pytest.mark.filterwarnings("default")  # warnings of the libraries
SCRIPTS = Path(__file__).parent / "scripts"
#: Of each script, the lines after or instead of which the two lines for a plan come.
CHANGES = {
    "run_clm.py": (
        ("    set_seed,\n)\n", "    set_seed,\n)\nfrom weft.hf import Trainer\n"),
        ("        args=args,\n", '        args=args,\n        plan="PLAN",\n'),
    ),
    "sft.py": (
        ("TrlParser, get_peft_config\n", "TrlParser, get_peft_config\nfrom weft.hf import use\n"),
        ("trainer = SFTTrainer(\n", 'trainer = use(SFTTrainer)(plan="PLAN",\n'),
    ),
}


def adapted(name: str, plan: str) -> str:
    """Return the script with two new or changed lines."""
    before = text = (SCRIPTS / name).read_text()
    for old, new in CHANGES[name]:
        assert text.count(old) == 1
        text = text.replace(old, new.replace("PLAN", plan))
    assert len({*text.splitlines()} - {*before.splitlines()}) == 2
    return text


def save_data(folder: Path) -> None:
    """Save a tokenizer, a random model in float64 and texts."""
    trl_cases.save_folder(folder / "model")
    transformers.AutoModelForCausalLM.from_pretrained(folder / "model").double().save_pretrained(folder / "model")
    texts = trl_cases.texts(40, seed=5)
    (folder / "train.txt").write_text("\n".join(texts[:30]))
    (folder / "eval.txt").write_text("\n".join(texts[30:]))
    (folder / "train.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts[:24]))


def words(name: str, folder: Path, out: Path, batch: int, *more: str) -> list[str]:
    """Return the command line of a script."""
    own = {
        "run_clm.py": ["--train_file", f"{folder}/train.txt", "--validation_file", f"{folder}/eval.txt", "--do_train",
                       "--do_eval", "--dtype", "float64", "--adam_epsilon", "1e-6"],
        "sft.py": ["--dataset_name", f"{folder}/train.jsonl", "--bf16", "false", "--max_length", "16",
                   "--adam_epsilon", "1e-4"],
    }[name]  # fmt: skip
    return [
        name, "--model_name_or_path", f"{folder}/model", *own, "--output_dir", str(out),
        "--use_cpu", "true", "--per_device_train_batch_size", str(batch), "--per_device_eval_batch_size", "2",
        "--num_train_epochs", "1", "--learning_rate", "3e-3", "--logging_steps", "1",
        "--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "true", *more,
    ]  # fmt: skip


def run(file: Path, line: list[str]) -> None:
    before, sys.argv = sys.argv, line
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv = before


def run_on_rank(file: Path, line: list[str]) -> None:
    with cases.as_rank():
        run(file, line)


def results(out: Path) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor]]:
    """Return the losses, the results of the evaluation and the weights that a script has saved."""
    state = json.loads((out / "trainer_state.json").read_text())
    losses = [one["loss"] for one in state["log_history"] if "loss" in one]
    found = json.loads((out / "eval_results.json").read_text())
    names = ("eval_loss", "perplexity", "eval_accuracy", "eval_mean_token_accuracy")
    weights = next(one for one in out.iterdir() if one.suffix == ".safetensors")
    return losses, {name: found[name] for name in names if name in found}, load_file(weights)


def expect_equal(ranks2: Any, folder: Path, name: str, plan: str, *more: str) -> None:
    save_data(folder)
    ranks, number = (2 if "dp_" in plan else 1), "2" if "pp" in plan else "1"
    accumulates = ("--gradient_accumulation_steps", number, *more)
    run(SCRIPTS / name, words(name, folder, folder / "one", 2 * ranks, *accumulates))
    (folder / name).write_text(adapted(name, plan))
    ranks2.run(run_on_rank, folder / name, words(name, folder, folder / "ranks", 2, *accumulates))
    (losses, evaluation, weights), (one_losses, one_evaluation, one_weights) = (
        results(folder / "ranks"), results(folder / "one"),
    )  # fmt: skip
    assert len(losses) >= 4
    assert losses == pytest.approx(one_losses, abs=1e-6)  # logged in float32
    if name == "sft.py" and plan != "tp=2":  # TRL's metric is a mean over the batches of all ranks
        evaluation, one_evaluation = ({"eval_loss": one["eval_loss"]} for one in (evaluation, one_evaluation))
    assert evaluation == pytest.approx(one_evaluation, rel=1e-6)
    assert weights.keys() == one_weights.keys()
    tolerance = 1e-12 if name == "run_clm.py" else 5e-6  # TRL computes logits in float32
    for key, weight in one_weights.items():
        torch.testing.assert_close(weights[key], weight, rtol=0, atol=tolerance)


PLANS = ("dp_shard=2 zero=1", "dp_shard=2 zero=3", "tp=2", "pp=2", "cp=2")


@pytest.mark.parametrize(
    "plan", [PLANS[1], *(pytest.param(plan, marks=pytest.mark.full) for plan in PLANS if plan != PLANS[1])]
)
def test_a_script_of_transformers_under_a_plan(ranks2, tmp_path, plan):
    expect_equal(ranks2, tmp_path, "run_clm.py", plan)


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "more"),
    [*((plan, ()) for plan in PLANS), ("dp_shard=2 zero=3", ("--use_peft", "--lora_r", "4", "--lora_dropout", "0"))],
)
def test_a_script_of_trl_under_a_plan(ranks2, tmp_path, plan, more):
    pytest.importorskip("trl", reason="TRL is not installed")
    pytest.importorskip("datasets", reason="datasets is not installed")
    expect_equal(ranks2, tmp_path, "sft.py", plan, *more)
