"""Complete runs in one process: their files, resume, and errors."""

from __future__ import annotations

import io
import math
import os
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import SMALL
from weft.checkpoint.load import load_checkpoint
from weft.config.files import load_config
from weft.config.run_config import RunConfig
from weft.errors import CheckpointError, ConfigError, DataError, LaunchError, LayoutError, PlanError
from weft.models.registry import build_decoder
from weft.monitor.events import read_events
from weft.train.folder import RunFolder, run_lock
from weft.train.preparation import prepare_run
from weft.train.rank_run import Start, run_rank
from weft.train.states.model_state import expected_bytes
from weft.train.tasks.generation import generate_text
from weft.train.weights.decoder_files import data_of, decoder_of
from weft.train.weights.run_adapter import with_adapter


def test_layout_is_checked_before_ranks_start_and_saved_in_the_folder(tmp_path, text):
    file = tmp_path / "my.layout"
    words = "embed=vocab blocks.*.mlp.{gate,up}=colwise blocks.*.mlp.down=rowwise head=vocab"
    file.write_text(words.replace(" ", "\n"))
    settings = [
        *SMALL,
        f"data.train={text}",
        f"run.dir={tmp_path}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "plan=tp=2",
    ]
    folder = prepare_run(load_config(None, [*settings, f"layout={file}"]).config, world_size=2)
    file.unlink()
    assert folder.config().layout == words
    with pytest.raises(LayoutError, match=r"'blocks.*.mlp.upp': the model has no such module"):
        prepare_run(load_config(None, [*settings, "layout=blocks.*.mlp.upp=colwise"]).config, world_size=2)
    with pytest.raises(ConfigError, match=r"layout=blocks.*.mlp.up=colwide: .*not one of colwise"):
        load_config(None, [*settings, "layout=blocks.*.mlp.up=colwide"])


def weights(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    found = load_file(folder.checkpoint(step) / "model.safetensors")
    return found | load_file(folder.checkpoint(step) / "optimizer.safetensors")


def assert_same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_run_folder_contains_all_records(plots, start):
    folder, result, shown = start()
    assert (result.step, result.reason) == (12, "finished")
    names = {path.name for path in folder.path.iterdir()}
    assert {"config.toml", "plan.txt", "model.json", "data.json", "tokenizer", "events.jsonl", "loss.png"} <= names
    assert (folder.path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (folder.path / "plan.txt").read_text() == "\n"  # the default plan: one rank
    assert [path.name for path in (folder.path / "samples").iterdir()] == ["step_00000012.txt"]
    events = read_events(folder.events)
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, 13))
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_s", "seconds", "memory_bytes"} <= steps[0].keys()
    assert {"data", "forward", "backward", "reduce", "optimizer", "total"} == steps[0]["seconds"].keys()
    evals = [event for event in events if event["event"] == "eval"]
    assert [event["step"] for event in evals] == [4, 8, 12]
    assert evals[-1]["loss"] < evals[0]["loss"]
    assert evals[-1]["bits_per_byte"] < evals[0]["bits_per_byte"]
    assert "step 12/12" in shown
    assert "weft generate" in shown
    assert "Traceback" not in shown


def test_resolved_config_loads_back_unchanged(start):
    folder, _, _ = start("optimizer.lr=0.002")
    again = load_config(folder.path / "config.toml").config
    assert again == folder.config()
    assert again.optimizer.lr == 0.002


def test_config_is_validated_once_before_and_once_on_its_rank(start, monkeypatch):
    validate, names = RunConfig.model_validate, []

    def counted(tables):
        names.append(tables["run"]["name"])
        return validate(tables)

    monkeypatch.setattr(RunConfig, "model_validate", counted)
    start("run.name=once", "train.steps=3", "checkpoint.every=1")
    assert names == ["once", "once"]


def test_run_in_two_parts_ends_with_equal_bits(start):
    undisturbed, _, _ = start("run.name=undisturbed")
    halves, _, _ = start("run.name=halves", "checkpoint.keep=9")
    # As if the process had died in step 9: later saves were never committed.
    for step in (9, 12):
        (halves.checkpoint(step) / "COMMIT").unlink()
    _, result, shown = start("run.name=halves", "checkpoint.keep=9")
    assert result.step == 12
    assert "resumed from step 8" in shown
    assert "2 unfinished checkpoints ignored: step 9, 12; COMMIT is missing" in shown
    assert_same_bits(weights(undisturbed, 12), weights(halves, 12))


def test_best_checkpoint_is_retained_beyond_keep(start):
    folder, _, _ = start("checkpoint.keep=1", "optimizer.lr=0.5", "schedule.kind=constant", "eval.every=1")
    events = read_events(folder.events)
    evals = {event["step"]: event["loss"] for event in events if event["event"] == "eval"}
    best = min(evals, key=lambda step: evals[step])
    kept = {int(path.name.removeprefix("step_")) for path in folder.checkpoints.glob("step_*")}
    assert kept == {best, 12}


def test_finished_run_reports_it_and_continues_with_more_steps(start):
    first, _, _ = start()
    _, result, shown = start()
    assert result.step == 12
    assert "is complete" in shown
    assert "train.steps=24" in shown
    _, result, shown = start("train.steps=14")
    assert result.step == 14
    assert "resumed from step 12" in shown
    assert first.checkpoint(14).is_dir()


def test_settings_that_change_the_run_are_rejected_by_name(start):
    folder, _, _ = start()
    before = (folder.path / "config.toml").read_text()
    with pytest.raises(ConfigError) as caught:
        start("seed=7", "model.dim=64", "optimizer.lr=0.5")
    text = str(caught.value)
    assert text.splitlines() == [
        f"seed=7: the run in '{folder.path}' was started with 0, and cannot continue with another value. Use "
        "run.name=quickstart-2 for a new run, or seed=0 to resume.",
        f"model.dim=64: the run in '{folder.path}' was started with 32, and cannot continue with another value. Use "
        "run.name=quickstart-2 for a new run, or model.dim=32 to resume.",
    ]
    assert (folder.path / "config.toml").read_text() == before


def test_config_rule_errors_precede_differences_to_the_existing_run(text, tmp_path):
    settings = [*SMALL, f"data.train={text}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
    prepare_run(load_config(None, settings).config, world_size=2)
    config = load_config(None, [*settings, "train.global_batch=3"]).config
    with pytest.raises(PlanError, match=r"train.global_batch=3: 2 data-parallel ranks"):
        prepare_run(config, world_size=2)


def test_misfit_plan_is_rejected_before_anything_is_written(text, tmp_path):
    config = load_config(None, [*SMALL, f"data.train={text}", f"run.dir={tmp_path}"]).config
    with pytest.raises(PlanError, match=r"train.global_batch=4: 3 data-parallel ranks"):
        prepare_run(config, world_size=3)
    assert not (tmp_path / "quickstart").exists()


def test_changed_text_is_rejected_with_a_working_command(start, text):
    folder, _, _ = start("train.steps=3")
    text.write_text(text.read_text().replace("loom", "moon"))
    with pytest.raises(DataError) as caught:
        start("train.steps=6")
    assert RunFolder(folder.path).config().train.steps == 3
    said = str(caught.value)
    assert said.startswith(f"data.train.0: it is {text} (")
    assert f", and was {text} (" in said
    pasted = said.split(" Use ")[1].split(" for a new run")[0]
    assert start("train.steps=6", *shlex.split(pasted))[0].path.name == "quickstart-2"
    with pytest.raises(DataError, match=r"Use run\.name=quickstart-3 for a new run"):
        start("train.steps=6")


def test_run_resumes_from_touched_or_moved_data(start, text, tmp_path):
    start("train.steps=3")
    os.utime(text, ns=(1, 1))
    assert "resumed from step 3" in start("train.steps=4")[2]
    (tmp_path / "other").mkdir()
    moved = text.rename(tmp_path / "other" / "renamed.jsonl")
    relative = os.path.relpath(moved)
    folder, _, shown = start("train.steps=5", f"data.train={relative}", f"data.cache_dir={tmp_path / 'other'}")
    assert "resumed from step 4" in shown
    assert folder.config().data.train[0].path == relative


def test_other_packing_is_rejected_and_explicit_default_accepted(start):
    start("train.steps=3")
    assert "resumed from step 3" in start("train.steps=4", "data.packing=concat")[2]
    with pytest.raises(DataError, match=r"data.train.0: its packing is pad, and data.packing=concat was used"):
        start("train.steps=5", "data.packing=pad")


def test_saved_tokenizer_may_be_moved(text, tmp_path):
    def prepare(*overrides: str) -> RunFolder:
        places = [f"data.train={text}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
        return prepare_run(load_config(None, [*SMALL, *places, *overrides]).config, world_size=1)

    made = prepare("tokenizer.kind=bpe", "tokenizer.vocab_size=300", "run.name=first").path / "tokenizer"
    first = shutil.copytree(made, tmp_path / "first_place")
    digest = data_of(prepare("tokenizer.kind=file", f"tokenizer.path={first}")).digest
    moved = first.rename(tmp_path / "second_place")
    assert data_of(prepare("tokenizer.kind=file", f"tokenizer.path={moved}")).digest == digest


def test_error_for_damaged_data_json_gives_the_command(start, text):
    folder, _, _ = start("train.steps=3")
    (folder.path / "data.json").write_text("{")
    with pytest.raises(DataError, match=r"data\.json: it cannot be read: .* Type rm (\S+) and repeat") as caught:
        start("train.steps=6")
    Path(str(caught.value).split("Type rm ")[1].split(" ")[0]).unlink()
    assert "resumed from step 3" in start("train.steps=4")[2]


def test_epochs_are_converted_to_steps(text, tmp_path):
    places = [f"data.train={text}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
    settings = [word for word in SMALL if not word.startswith("train.steps=")] + places
    folder = prepare_run(load_config(None, [*settings, "train.epochs=0.5"]).config, world_size=1)
    last_line = data_of(folder).summary[-1]
    told = re.fullmatch(r"train.epochs=0.5: (\d+) sequences an epoch, 4 a step: (\d+) steps", last_line)
    assert told is not None
    assert folder.config().train.steps == int(told[2]) == math.ceil(int(told[1]) / 8)
    assert folder.config().train.epochs is None
    with pytest.raises(ConfigError, match=r"schedule.warmup_steps=2: warm-up must end before train.steps=1"):
        prepare_run(load_config(None, [*settings, "train.epochs=0.001", "run.name=short"]).config, world_size=1)


def test_run_without_evaluation_data_reports_no_evaluation(start):
    folder, result, shown = start("data.holdout=0", "train.steps=4")
    assert result.step == 4
    assert not [event for event in read_events(folder.events) if event["event"] == "eval"]
    assert "eval " not in shown


def test_early_stop_ends_the_run_when_evaluation_stops_improving(start):
    _, result, _ = start(
        "train.steps=200", "eval.every=2", "optimizer.lr=1.0", "schedule.kind=constant", "train.early_stop.patience=2"
    )
    assert result.step < 200
    assert result.reason == "no better evaluation loss in 2 evaluations"


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.full)])
def test_signal_saves_and_stops_and_the_same_command_resumes(start, monkeypatch, signum):
    undisturbed, _, _ = start("run.name=undisturbed")
    from weft.train.loop.trainer import Trainer

    original = Trainer._launch

    def interrupted(self, step, *batches):
        if step == 4 and not sent:
            sent.append(step)
            os.kill(os.getpid(), signum)
        return original(self, step, *batches)

    sent: list[int] = []
    monkeypatch.setattr(Trainer, "_launch", interrupted)
    folder, result, shown = start("run.name=stopped")
    assert (result.step, result.reason) == (5, "asked to stop")
    assert "the same command continues from here" in shown
    _, result, _ = start("run.name=stopped")
    assert result.step == 12
    assert_same_bits(weights(undisturbed, 12), weights(folder, 12))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else b"")
        for file in folder.rglob("*")
    }


def test_second_run_in_a_folder_is_rejected_and_changes_nothing(start):
    folder, _, _ = start("train.steps=3")
    with run_lock(folder.path):
        before = contents(folder.path)
        with pytest.raises(LaunchError, match=rf"process {os.getpid()} is training in"):
            start("train.steps=6", "optimizer.lr=0.5")
        with pytest.raises(LaunchError, match=rf"process {os.getpid()} is training in"):
            run_rank(folder.path)
        assert contents(folder.path) == before
    start("train.steps=6")


def test_run_uses_prepared_data_even_if_its_files_change(tmp_path, text):
    settings = [*SMALL, f"data.train={text}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
    folder = prepare_run(load_config(None, [*settings, "train.steps=3"]).config, world_size=1)
    for name in ("config.toml", "plan.txt", "model.json", "data.json"):
        (folder.path / name).write_text("of another command")
    assert run_rank(folder, None, io.StringIO()).step == 3


def test_rejected_new_run_leaves_no_folder(tmp_path):
    config = load_config(None, [*SMALL, "data.train=none.jsonl", f"run.dir={tmp_path / 'a' / 'b'}"]).config
    with pytest.raises(DataError):
        prepare_run(config, world_size=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [
        ("plan=precision=bf16",),
        pytest.param(("plan=precision=fp64", "optimizer.name=sgd"), marks=pytest.mark.full),
        pytest.param(("optimizer.name=sgd", "optimizer.momentum=0"), marks=pytest.mark.full),
        ("optimizer.name=muon", 'optimizer.groups=[{match="embed.*", lr=0}]'),
        pytest.param(("model.num_experts=4", "model.top_k=2", "model.balance=bias"), marks=pytest.mark.full),
        pytest.param(("model.name=gpt2", "model.num_kv_heads=2", "model.vocab_size=260"), marks=pytest.mark.full),
        ("adapter.rank=32", "adapter.kind=dora"),
    ],
    ids=" ".join,
)
def test_checkpoint_bytes_are_computed_before_the_first_step(start, settings):
    folder, _, _ = start("train.steps=2", *settings)
    config, tensors = folder.config(), load_checkpoint(folder.checkpoint(2))
    saved = sum(t.nbytes for group in ("model", "optimizer") for t in tensors.tensors(group).values())
    master = torch.float64 if "fp64" in config.plan else torch.float32
    shapes = with_adapter(build_decoder(decoder_of(folder), device="meta"), config)
    assert expected_bytes(shapes, config.optimizer, master) == pytest.approx(saved, rel=0.001)


def test_adapter_trains_and_resumes_with_equal_bits(start):
    settings = ("adapter.rank=2", 'adapter.targets=["attn.*"]', "adapter.dropout=0.2", "schedule.kind=constant")
    undisturbed, _, shown = start("run.name=undisturbed", "train.steps=4", *settings)
    start("run.name=halves", "train.steps=2", *settings)
    halves, _, _ = start("run.name=halves", "train.steps=4", *settings)
    assert_same_bits(weights(undisturbed, 4), weights(halves, 4))
    assert re.search(r"adapter lora of rank 2, alpha 4, dropout 0.2, on \d+ layers: .* parameters trained", shown)
    names = load_checkpoint(undisturbed.checkpoint(4)).entries("model")
    assert {name.rpartition(".")[2] for name in names} == {"lora_A", "lora_B"}
    assert generate_text(undisturbed, "def ", max_tokens=4).startswith("def ")
    with pytest.raises(ConfigError, match=r"adapter.rank=4: the run in .* was started with 2"):
        start("run.name=undisturbed", "train.steps=6", *settings, "adapter.rank=4")
    with pytest.raises(ConfigError, match=r"adapter.targets=wq: no module has such a path or ending"):
        start("run.name=other", "train.steps=2", "adapter.rank=2", 'adapter.targets=["wq"]')


def test_disk_space_for_a_checkpoint_is_checked_before_the_first_step(start, monkeypatch):
    folder, _, _ = start("train.steps=3")
    saved = sum(file.stat().st_size for file in folder.checkpoint(3).glob("*.safetensors"))
    free = shutil.disk_usage(folder.path)._replace(free=saved - 10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    with pytest.raises(CheckpointError, match=r"run.dir=.*: the checkpoint needs .* are free. Free .* or choose"):
        start("train.steps=6")
    assert [event["step"] for event in read_events(folder.events) if event["event"] == "step"] == [1, 2, 3]
    # A run without remaining steps needs no space.
    start("train.steps=3")


def test_run_stops_before_its_time_limit_and_the_same_command_resumes(start):
    _, result, shown = start("train.steps=9", "train.max_time=10s")  # exactly the time reserved for ending
    assert result.step == 2  # the first step votes, the second one informs all ranks
    assert "stopped at step 2 of 9: train.max_time=10s is nearly used up" in shown
    assert "the same command continues from here" in shown
    assert start("train.steps=9", "train.max_time=9h")[1].step == 9


def test_time_limit_reached_before_the_first_step_is_an_error(tmp_path, text):
    settings = [*SMALL, f"data.train={text}", f"run.dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}"]
    run = prepare_run(load_config(None, [*settings, "train.max_time=1m30s"]).config, world_size=1)
    with pytest.raises(ConfigError, match=r"train.max_time=1m30s: the time ran out 1\d s before the first step. Use "):
        run_rank(run, None, io.StringIO(), Start(began=time.monotonic() - 100))


def test_run_generates_text(start):
    folder, _, _ = start()
    text = generate_text(folder.path, "warp", max_tokens=5, temperature=0.0)
    assert text.startswith("warp")
    assert text == generate_text(folder.path, "warp", max_tokens=5, temperature=0.0)
    assert generate_text(folder.path, "warp", max_tokens=5, step=12)
    with pytest.raises(CheckpointError, match=r"step=5: .* has no such checkpoint. Saved steps: "):
        generate_text(folder.path, "warp", step=5)


def test_folder_without_run_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"it has no config.toml, so it is not a run folder of Weft"):
        generate_text(tmp_path, "def ")


@pytest.mark.parametrize(
    "plan",
    [
        "precision=bf16",
        "precision=fp16",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("precision=fp64", "accumulation=2")),
    ],
)
def test_every_precision_trains(start, plan):
    folder, result, _ = start(f"plan={plan}", "train.steps=6", "eval.every=3")
    assert result.step == 6
    evals = [event["loss"] for event in read_events(folder.events) if event["event"] == "eval"]
    assert evals[1] < evals[0]


@pytest.mark.full
def test_sgd_trains_and_resumes(start):
    folder, _, _ = start("optimizer.name=sgd", "optimizer.lr=0.1", "train.steps=6")
    start("optimizer.name=sgd", "optimizer.lr=0.1", "train.steps=8")
    evals = [event["loss"] for event in read_events(folder.events) if event["event"] == "eval"]
    assert evals[-1] < evals[0]


def test_run_with_memory_budget_reports_its_choice_and_ends_with_equal_bits(start):
    plain, _, _ = start("run.name=plain")
    folder, _, shown = start("run.name=budget", "plan=recompute=60% accumulation=1")
    line = next(line for line in shown.splitlines() if line.startswith("memory"))
    assert line.startswith("memory  recompute 60%: 2 blocks as ")
    assert_same_bits(weights(folder, 12), weights(plain, 12))
