"""A user-defined task, selected by class name in a config: it trains, resumes, is planned and verified."""

from __future__ import annotations

import io
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from weft.checkpoint.load import load_checkpoint
from weft.cli.app import run
from weft.config.files import load_config
from weft.config.plan import Plan
from weft.errors import ConfigError
from weft.monitor.events import read_events
from weft.train.folder import RunFolder
from weft.train.planned import resolve_plan
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank
from weft.train.tasks.registry import find_task
from weft.verify.case_data import Settings
from weft.verify.subject import find_subject
from weft.verify.verifier import Verifier

IMAGES = ["task=tests.train.image_task:ImageTask", "train.steps=9", "train.global_batch=8", "eval.every=3",
          "checkpoint.every=3", "launch.device=cpu"]  # fmt: skip
HERE = Path(__file__).parent


@pytest.fixture
def start(tmp_path: Path):
    def train(*overrides: str) -> tuple[RunFolder, str]:
        folder = prepare_run(load_config(None, [*IMAGES, f"run.dir={tmp_path}", *overrides]).config, world_size=1)
        terminal = io.StringIO()
        run_rank(folder, None, terminal)
        return folder, terminal.getvalue()

    return train


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(folder / "checkpoints" / f"step_{step:08d}")
    return {**checkpoint.tensors("model"), **checkpoint.tensors("optimizer")}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_images_are_trained_counted_and_evaluated(start):
    folder, shown = start()
    events = read_events(folder.events)
    steps = [event for event in events if event["event"] == "step"]
    assert {"images", "images_per_s"} <= steps[0].keys()
    assert not {"tokens", "tokens_per_s", "unit"} & steps[0].keys()
    assert [event["images"] for event in steps] == [8] * 9
    found = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in found] == [3, 6, 9]
    assert all(event["images"] == 16 for event in found)
    assert 0.25 <= found[-1]["accuracy"] <= 1
    assert found[-1]["loss"] < found[0]["loss"]
    assert "images/s" in shown
    assert " accuracy\n        accuracy: Share of the images whose label the model names.\n" in shown
    for word in ("token", "weft generate", "sequence"):
        assert word not in shown
    assert {path.name for path in folder.path.iterdir()}.isdisjoint({"model.json", "data.json", "tokenizer"})


def test_run_in_two_parts_ends_with_equal_bits(start):
    undisturbed, _ = start("run.name=undisturbed")
    halves, _ = start("run.name=halves", "checkpoint.keep=9")
    for step in (6, 9):  # as if the process had died before
        (halves.checkpoint(step) / "COMMIT").unlink()
    _, shown = start("run.name=halves", "checkpoint.keep=9")
    assert "resumed from step 3" in shown
    assert_equal(saved(undisturbed.path, 9), saved(halves.path, 9))


def test_docs_page_contains_this_task():
    page = (HERE.parents[1] / "docs" / "how-to" / "own_task.md").read_text()
    assert f"```python\n{(HERE / 'image_task.py').read_text()}```" in page
    assert len((HERE / "image_task.py").read_text().splitlines()) < 50


def test_epochs_count_the_tasks_samples(tmp_path):
    words = [word for word in IMAGES if not word.startswith("train.steps")]
    config = load_config(None, [*words, f"run.dir={tmp_path}", "train.epochs=0.5"]).config
    assert prepare_run(config, world_size=1).config().train.steps == 4


def test_planner_chooses_a_plan_and_reads_its_config(tmp_path, capsys):
    config, best = resolve_plan(load_config(None, [*IMAGES, f"run.dir={tmp_path}", "plan=auto"]).config, 2, 2)
    assert best is not None
    assert config.plan == best.plan.format()
    assert best.plan.world_size == 2
    file, out = tmp_path / "run.toml", tmp_path / "out.toml"
    file.write_text('task = "tests.train.image_task:ImageTask"\n[train]\nglobal_batch = 64\n')
    assert run(["plan", str(file), "8xh100", "--top", "1", "--out", str(out)]) == 0
    assert "ImageTask, " in (shown := capsys.readouterr().out)
    assert "64 images a step" in shown
    find_task(load_config(out).config)  # the written config trains the task


def test_planner_uses_the_tasks_name_for_samples(tmp_path, capsys):
    file = tmp_path / "images.toml"
    file.write_text('task = "tests.train.image_task:ImageTask"\n[train]\nglobal_batch = 8\n')
    assert run(["plan", str(file), "2xh100", "--top", "1"]) == 0
    shown = capsys.readouterr().out
    assert "on 2xh100: 8 images a step" in shown
    assert "images/s" in shown
    assert "samples" not in shown


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def build(self): raise ValueError('odd')", "build raised ValueError at own.py:3 (odd). Correct it;"),
        ("def build(self): return __import__('torch').nn.Linear(-1)", "build raised TypeError at own.py:3 ("),
        ("def samples(self, split): return open('images.npy')", "samples raised FileNotFoundError at own.py:3 ("),
        ("def samples(self, split): return [0]", "it has 1 training samples, and tracing takes 2. Add some."),
    ],
)  # fmt: skip
def test_task_error_during_planning_is_one_message(tmp_path, capsys, body, message):
    code = tmp_path / "own.py"
    code.write_text(f"from tests.train.image_task import ImageTask\nclass Own(ImageTask):\n    {body}\n")
    file = tmp_path / "own.toml"
    file.write_text(f'task = "{code}:Own"\n')
    assert run(["plan", str(file), "2xh100"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: task.name={code}:Own: {message}")
    assert "Traceback" not in shown


@pytest.mark.parametrize("plan", ["dp_replicate=2 accumulation=2", "dp_shard=2 zero=3"])
def test_two_ranks_train_like_one_process(tmp_path, ranks2, plan):
    file = tmp_path / "run.toml"
    file.write_text('task = "tests.train.image_task:ImageTask"\n')
    with Verifier(find_subject(str(file), Settings()), 2, ranks2) as verifier:
        verdict = verifier.verify(Plan.parse(plan))
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["task.options.sise=8"], r"task\.options\.sise: .*has no such option\. Did you mean 'side'\?"),
        (["task.options.side=big"], r"task\.options\.side=big: .* takes a whole number"),
        (["task=tests.train.image_task:Nothing"], r"task\.name=.*Nothing: it cannot be imported"),
        (
            ["task=tests.train.image_task:TensorDataset"],
            r"task\.name=.*TensorDataset: it is not a subclass of weft\.train\.Task",
        ),
        (
            ["task=tests.train.fake_engine:LineTask", "task.options.width=3"],
            r"task\.options\.width: .*:LineTask has no such option\. It takes none\.",
        ),
        (["task=weft.train:Task"], r"task\.name=weft\.train:Task: a task needs build and samples and loss\. Define"),
        (["task=tests/train/none.py:X"], r"task\.name=.*: it cannot be imported \(FileNotFoundError"),
        (["model.dim=64", "sample.prompt=a"], r"model\.dim: only the text decoder reads it, .*\n.*sample\.prompt: "),
    ],
)
def test_invalid_task_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        find_task(load_config(None, [*IMAGES, *settings]).config)


def test_options_without_task_and_other_task_in_folder_are_rejected(start):
    with pytest.raises(ConfigError, match=r"task\.options=\{side = 8\}: only a task with a task.name"):
        load_config(None, ["task.options.side=8"])
    start("train.steps=3")
    with pytest.raises(ConfigError, match=r"task\.options\.dim=32: the run in .* was started without it"):
        start("task.options.dim=32")


@pytest.mark.full
def test_killed_command_resumes_from_its_config(tmp_path):
    """Run `weft train` on two ranks with a task in a file next to the config; kill it and run it again."""
    shutil.copy(HERE / "image_task.py", tmp_path / "images.py")
    text = '[task]\nname = "images.py:ImageTask"\n[task.options]\nside = 16\n[train]\nsteps = 40\nglobal_batch = 8\n'
    (tmp_path / "run.toml").write_text(text + "[checkpoint]\nevery = 4\nkeep = 99\n")
    words = [sys.executable, "-m", "weft", "train", "run.toml", "launch.device=cpu", "launch.ranks=2"]
    subprocess.run([*words, "run.name=undisturbed"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=200)
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        until = time.monotonic() + 100
        while not list(tmp_path.glob("runs/run/checkpoints/step_*/COMMIT")) and time.monotonic() < until:
            time.sleep(0.01)
        first.send_signal(signal.SIGKILL)
    subprocess.run([*words, "plan=dp_shard=2 zero=1"], cwd=tmp_path, check=True, capture_output=True, timeout=200)
    ours, theirs = saved(tmp_path / "runs" / "run", 40), saved(tmp_path / "runs" / "undisturbed", 40)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)
    assert any(event["event"] == "resume" for event in read_events(tmp_path / "runs" / "run" / "events.jsonl"))
