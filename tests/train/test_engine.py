"""The loop, the run folder, checkpoints and the display with an engine without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from weft.checkpoint.load import load_checkpoint
from weft.checkpoint.safetensors_files import block_of, tensor_of
from weft.monitor.events import read_events

_SCRIPT = """
import gc, io, json, sys
from tests.train.fake_engine import FakeEngine
from weft.config.files import load_config
from weft.train import Start, prepare_run, run_rank

collects = []
step = FakeEngine.step
FakeEngine.step = lambda engine, *given: collects.append(gc.isenabled()) or step(engine, *given)


def train(name, steps):
    words = ["task=tests.train.fake_engine:LineTask", f"run.dir={sys.argv[1]}", f"run.name={name}", "eval.every=4",
             "train.steps=" + str(steps), "train.global_batch=8", "checkpoint.every=3", "schedule.kind=constant",
             "optimizer.lr=0.05", "checkpoint.keep=9"]
    folder = prepare_run(load_config(None, words).config, world_size=1)
    terminal = io.StringIO()
    result = run_rank(folder, None, terminal, Start(engine="tests.train.fake_engine:FakeEngine"))
    return [result.step, result.reason, terminal.getvalue()]

told = [train("whole", 9), train("halves", 4), train("halves", 9)]
print(json.dumps({"told": told, "collects": [collects[:9], gc.isenabled()], "torch": "torch" in sys.modules}))
"""


def test_run_trains_saves_and_resumes_without_torch(tmp_path):
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["torch"]
    assert found["collects"] == [
        [True, *[False] * 8],
        True,
    ]  # automatic collection before the end of the first step, and after the run
    (*whole, shown), (*first, _), (*second, resumed) = found["told"]
    assert (whole, first, second) == ([9, "finished"], [4, "finished"], [9, "finished"])
    assert "resumed from step 4" in resumed
    assert "points/s" in shown
    assert " slope" in shown
    ends = [load_checkpoint(tmp_path / name / "checkpoints" / "step_00000009") for name in ("whole", "halves")]
    for group, name in (("model", "line"), ("optimizer", "line/momentum")):
        ours, theirs = (end.tensors(group)[name] for end in ends)
        assert ours.shape == (2,)
        assert torch.equal(ours, theirs)
    events = read_events(tmp_path / "whole" / "events.jsonl")
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 9
    assert losses[-1] < losses[0]
    assert [event["slope"] for event in events if event["event"] == "eval"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensor_block_round_trip(dtype):
    tensor = (torch.randn(3, 4) * 9).to(dtype)
    block = block_of(tensor)
    assert torch.equal(tensor_of(block), tensor)
    assert block.largest() == (float(tensor.abs().max()) if dtype.is_floating_point else 0.0)
    if dtype.is_floating_point:
        tensor[1, 1] = float("nan")
        assert np.isnan(block_of(tensor).largest())
    assert tensor_of(block_of(tensor[:0])).shape == (0, 4)
