"""`weft train` shards the tables of a task's model, trains them by row and resumes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from tests.train.table_task import ITEMS, UNUSED, USERS
from weft.checkpoint.load import load_checkpoint
from weft.config.files import load_config
from weft.errors import ConfigError
from weft.monitor.events import read_events
from weft.train.folder import RunFolder
from weft.train.preparation import prepare_run
from weft.train.rank_run import run_rank

TASK = ["task=tests.train.table_task:RatingTask", "train.steps=6", "train.global_batch=16", "eval.every=3",
        "checkpoint.every=3", "checkpoint.keep=9", "launch.device=cpu", "layout=user=rows item=columns",
        "tables.lr=0.1", "optimizer.lr=0.01"]  # fmt: skip


@pytest.fixture
def start(tmp_path: Path):
    def train(*overrides: str) -> RunFolder:
        folder = prepare_run(load_config(None, [*TASK, f"run.dir={tmp_path}", *overrides]).config, world_size=1)
        run_rank(folder, None, io.StringIO())
        return folder

    return train


def saved(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    checkpoint = load_checkpoint(folder.checkpoint(step))
    return {
        **checkpoint.tensors("model"),
        **{f"state {name}": one for name, one in checkpoint.tensors("optimizer").items()},
    }


def test_run_trains_tables_by_row_and_resumes_with_equal_bits(start):
    run = start("run.name=once")
    once, before = saved(run, 6), saved(run, 3)
    found = [event for event in read_events(run.events) if event["event"] == "eval"]
    assert found[-1]["loss"] < found[0]["loss"]
    assert once["state user.weight/row_sum"].shape == (USERS,)
    assert once["state item.weight/row_sum"].shape == (ITEMS,)
    assert "state user.weight/exp_avg" not in once
    assert not once["state user.weight/row_sum"][-UNUSED:].any()
    assert torch.equal(once["user.weight"][-UNUSED:], before["user.weight"][-UNUSED:])
    halves = start("run.name=halves")
    (halves.checkpoint(6) / "COMMIT").unlink()
    again = saved(start("run.name=halves"), 6)
    assert again.keys() == once.keys()
    assert all(torch.equal(tensor, once[name]) for name, tensor in again.items())


def test_group_that_matches_a_table_is_refused(start):
    with pytest.raises(ConfigError) as caught:
        start('optimizer.groups=[{match = "*.weight", lr = 0.1}]')
    assert str(caught.value) == (
        "optimizer.groups.0.match=*.weight: it matches 'user.weight', a table of the layout, whose optimizer is set in "
        "[tables]. Match other parameters."
    )
