"""`weft train` of an encoder-decoder in a pipeline: its checkpoint resumes under another plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.tuned_folders import save_model, write_tables
from weft.cli.app import run as weft_run

pytest.importorskip("transformers")


def trained(root: Path, kind: str, name: str, *words: str) -> dict[int, float]:
    """Return losses by step of a new or resumed run."""
    settings = [
        "task=seq2seq", "task.options.target_len=16", f"model.path={root / kind}",
        f"data.train={root / 'reversed.jsonl'}", f"data.cache_dir={root / 'cache'}", f"run.dir={root}",
        f"run.name={name}", "train.seq_len=16", "train.global_batch=8", "schedule.kind=constant",
        "schedule.warmup_steps=0", "checkpoint.every=3",
    ]  # fmt: skip
    assert weft_run(["train", *settings, *words]) == 0
    events = [json.loads(line) for line in (root / name / "events.jsonl").read_text().splitlines()]
    return {one["step"]: one["loss"] for one in events if one["event"] == "step"}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_pipeline_run_resumes_in_one_process(kind, tmp_path):
    write_tables(tmp_path)
    save_model(tmp_path / kind, kind)
    undisturbed = trained(tmp_path, kind, "undisturbed", "plan=precision=fp32", "train.steps=6", "launch.ranks=1")
    piped = ["plan=pp=2 microbatches=2 precision=fp32", "launch.ranks=2", "train.steps=3"]
    assert trained(tmp_path, kind, "piped", *piped) == pytest.approx(
        {step: undisturbed[step] for step in (1, 2, 3)}, rel=1e-5
    )
    resumed = trained(tmp_path, kind, "piped", "plan=precision=fp32", "train.steps=6", "launch.ranks=1")
    assert resumed == pytest.approx(undisturbed, rel=1e-5)
