"""`weft train` with [privacy]: draws, resume, the account, the budget, and the verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weft.checkpoint.load import load_checkpoint, newest_checkpoint
from weft.cli.app import run
from weft.parallel.state.flat_slices import read_full
from weft.train.folder import RunFolder
from weft.train.states.model_state import GroupSource

pytestmark = pytest.mark.usefixtures("forked_programs")

CONFIG = """
[task]
name = "{task}:Points"
[train]
global_batch = 16
steps = 6
[schedule]
kind = "constant"
warmup_steps = 0
[optimizer]
lr = 0.05
[checkpoint]
every = 3
[eval]
every = 0
[sample]
every = 0
[launch]
device = "cpu"
[privacy]
delta = 1e-4
noise = 1.2
key = "test:5"
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "private.toml"
    path.write_text(CONFIG.format(task=Path(__file__).with_name("private_task.py")))
    return path


def train(config: Path, name: str, *settings: str) -> tuple[int, Path]:
    folder = config.parent / "runs"
    code = run(["train", str(config), f"run.dir={folder}", f"run.name={name}", *settings])
    return code, folder / name


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = newest_checkpoint(RunFolder(folder).checkpoints)
    assert found is not None
    source = GroupSource(load_checkpoint(found.path), "model")
    return {name: read_full(source, name) for name in source.entries}


@pytest.mark.full
def test_resumed_run_equals_an_uninterrupted_one(config, capsys):
    assert train(config, "whole")[0] == 0
    assert train(config, "parts", "train.steps=3")[0] == 0
    assert train(config, "parts")[0] == 0
    whole, parts = weights(config.parent / "runs/whole"), weights(config.parent / "runs/parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    capsys.readouterr()
    assert run(["privacy", "report", str(config.parent / "runs/parts"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["steps"] == [[1.2, 0.08, 6]]
    assert report["is_test"]
    assert "key" not in report
    assert report["spent"]["prv"] == pytest.approx(report["spent"]["pld"], rel=0.01)
    assert run(["privacy", "report", str(config.parent / "runs/parts")]) == 0
    assert (
        "NOT PRIVATE: the key is known (privacy.key=test:...), so anyone can subtract the noise"
        in capsys.readouterr().out
    )
    # A checkpoint of private steps is not continued without privacy.
    assert train(config, "parts", "train.steps=8", "privacy.noise=0", "privacy.delta=0", "privacy.key=")[0] == 2


def test_spent_budget_stops_the_run(config, capsys):
    words = ["plan=dp_replicate=1", "privacy.epsilon=1.2", "privacy.noise=1.5", "train.steps=40", "privacy.key="]
    code, folder = train(config, "spent", *words)
    assert code == 0
    found = newest_checkpoint(RunFolder(folder).checkpoints)
    assert 1 < found.step < 40
    assert (folder / "privacy.key").stat().st_mode & 0o777 == 0o600
    secret = (folder / "privacy.key").read_bytes()
    assert not any(
        secret in path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "privacy.key"
    )
    capsys.readouterr()
    assert run(["privacy", "report", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["spent"]["prv"] <= 1.2
    assert train(config, "spent", *words)[0] == 2
    assert f"it is spent after {found.step} steps. Use the weights of this step" in capsys.readouterr().err


@pytest.mark.full
def test_audit_of_a_run(config, capsys):
    code, folder = train(config, "audited", "privacy.canaries=100")
    assert code == 0
    capsys.readouterr()
    assert run(["privacy", "audit", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["canaries"] == 100
    assert found["lower_bound"] <= found["stated"]
    code, folder = train(config, "plain", "train.steps=1")
    assert run(["privacy", "audit", str(folder)]) == 2
    assert "the run left no record out, so there is nothing to compare" in capsys.readouterr().err


def test_plan_prints_noise(capsys):
    words = ["--epsilon", "4", "--records", "2000", "--steps", "50", "--batch", "100", "--json"]
    assert run(["privacy", "plan", *words]) == 0
    [row] = json.loads(capsys.readouterr().out)["batches"]
    assert 0.5 < row["noise"] < 1.5
    assert row["most_drawn"] > 100


TEXT = """
[model]
name = "tiny"
dim = 16
num_layers = 1
num_heads = 2
num_kv_heads = 2
[data]
train = "texts.jsonl"
packing = "pad"
holdout = 0.0
cache_dir = "cache"
[train]
global_batch = 4
steps = 4
seq_len = 16
[schedule]
kind = "constant"
warmup_steps = 0
[checkpoint]
every = 2
[eval]
every = 0
[sample]
every = 0
[launch]
device = "cpu"
[privacy]
delta = 1e-3
noise = 1.0
key = "test:2"
unit = "document"
"""


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_replicate=1", "dp_replicate=2", "auto"])
def test_documents_of_token_files(tmp_path, monkeypatch, capfd, plan):
    """Documents of several sequences are drawn whole, and a resumed run draws the same ones."""
    monkeypatch.chdir(tmp_path)
    texts = ["word " * (1 + 3 * n % 20) + str(n) for n in range(30)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = tmp_path / "text.toml"
    config.write_text(f'plan = "{plan}"\n{TEXT}')
    assert train(config, "whole")[0] == 0
    assert "4 documents expected in a step" in capfd.readouterr().out
    assert train(config, "parts", "train.steps=2")[0] == 0
    assert train(config, "parts")[0] == 0
    whole, parts = weights(tmp_path / "runs/whole"), weights(tmp_path / "runs/parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    capfd.readouterr()
    assert run(["privacy", "report", str(tmp_path / "runs/parts"), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["unit"], report["records"], report["steps"]) == ("document", 30, [[1.0, 4 / 30, 4]])
    for number, (setting, why) in enumerate((
        ("data.packing=fit", "sequences of a stream pack several documents, so clipping a sequence bounds none"),
        ("privacy.unit=user", "privacy.unit=user: token files keep no columns. Use unit=document, or unit=sample"),
    )):  # fmt: skip
        assert train(config, f"refused-{number}", setting)[0] == 2
        assert why in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("plan", ["tp=2", "dp_shard=2 zero=3", "dp_replicate=2 accumulation=2"])
def test_verify_compares_with_single_samples(plan, capsys):
    words = ["verify", "-m", "tiny", "--plan", plan, "--privacy", "--steps", "2", "--seq-len", "8", "--json"]
    assert run([*words, "--layers", "2", "--width", "32", "--vocab", "32"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"]
    assert found["max_rel_diff"] < 1e-10


def test_verify_needs_one_plan(capsys):
    assert run(["verify", "-m", "tiny", "--all", "2", "--privacy"]) == 2
    assert "private steps are verified under one plan of the torch engine. Give --plan." in capsys.readouterr().err
