"""Reactions to a failure of a rank: restart, pause, fewer ranks, skipped data, or the end of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.checkpoint.load import list_checkpoints
from weft.cli.launch.failure import Failure
from weft.cli.launch.launch import RankFailed
from weft.cli.launch.restarts import Restarts, cause_of, config_for_world_size, for_ranks
from weft.config.run_config import RunConfig
from weft.errors import CheckpointError, CommError, ConfigError, DataError, OutOfMemory, TrainingHalted
from weft.monitor.alerts import GO_ON, HELD
from weft.monitor.events import read_events
from weft.train.folder import RunFolder
from weft.train.hooks import LEFT_OUT, leave_out, step_ranges, steps_left_out

DIED = Failure(1, -9)
DATA = Failure(0, 1, kind="ValueError", message="torn", step=7, in_data=True)
BAD = Failure(0, 3, kind="TrainingHalted", message="nan", expected=True, step=9, first_bad=7)
TYPO = Failure(0, 2, kind="ConfigError", message="x=1: no.", expected=True)


class Run:
    """Simulated ranks. Each start does the next of `ends`: fail, save a step, or finish (None)."""

    def __init__(
        self, folder: Path, *ends: Failure | int | None, on_bad: str = "stop", step: int | None = None, **launch: object
    ):
        config = RunConfig.model_validate({"launch": launch, "train": {"on_bad": on_bad}, "resume": {"step": step}})
        self.folder, self.ends, self.starts, self.messages = RunFolder(folder), [*ends], [], []
        self.slept: list[float] = []
        self.plans: list[str] = []
        self.words: list[str] = []
        self.configs: list[RunConfig] = []
        self.steps: list[int | None] = []
        self.restarts = Restarts(config, self.folder, 4, self.messages.append, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if "weft runs resume" in self.messages[-1]:
            (self.folder.path / GO_ON).write_text(self.words.pop(0) if self.words else "")

    def attempt(self, config: RunConfig, ranks: int) -> None:
        self.starts.append(ranks)
        self.plans.append(config.plan)
        self.configs.append(config)
        self.steps.append(config.resume.step)
        while isinstance(step := self.ends.pop(0), int):
            made = self.folder.checkpoints / f"step_{step:08d}"
            made.mkdir(parents=True)
            (made / "COMMIT").touch()
        if step is not None:
            raise RankFailed(step, self.folder.logs)

    def keep(self) -> list[int]:
        self.restarts.keep(self.attempt)
        return self.starts


@pytest.mark.parametrize(
    "error, cause",
    [(CommError("gone"), "hang"), (DataError("x"), "refused"), (ConfigError("x"), "refused"),
     (OutOfMemory("x"), "refused"),
     (CheckpointError("full"), "failed"), (ValueError("x"), "failed"), (TrainingHalted("disk"), "failed")],
)  # fmt: skip
def test_causes(error, cause):
    assert cause_of(Failure.from_exception(0, error)) == cause


def test_causes_marked_by_the_training_loop():
    halt, data = TrainingHalted("nan"), DataError("torn")
    halt.__dict__.update(step=9, first_bad=7)
    data.__dict__.update(step=7, in_data=True)
    assert [cause_of(Failure.from_exception(0, one)) for one in (halt, data)] == ["bad steps", "data"]
    assert cause_of(DIED) == "died"


def test_run_restarts_after_failures_with_growing_pauses(tmp_path):
    run = Run(tmp_path, DIED, Failure(0, 1, kind="ValueError"), None, restarts=2, restart_pause="3s")
    assert run.keep() == [4, 4, 4]
    assert run.slept == [3.0, 6.0]
    assert "rank 1 was killed by signal 9" in run.messages[0]
    assert run.messages[0].endswith("restart 1 of 2 in 3.00 s, from the start"), run.messages[0]
    assert [event["cause"] for event in read_events(run.folder.events)] == ["died", "failed"]


def test_new_checkpoint_resets_the_restart_count(tmp_path):
    run = Run(tmp_path, DIED, 10, DIED, 20, DIED, None, restarts=1, restart_pause="1s")
    assert len(run.keep()) == 4
    assert run.slept == [1.0, 1.0, 1.0]
    assert "from step 20" in run.messages[-1]
    assert len(list_checkpoints(run.folder.checkpoints)) == 2


def test_memory_copies_count_as_checkpoints(tmp_path):
    steps = iter([None, None, 12, 12, 12, 14])
    run = Run(tmp_path, DIED, 10, DIED, None, restarts=1, restart_pause="1s", min_ranks=1)
    run.restarts.copied = lambda: next(steps, 14)
    assert run.keep() == [4, 4, 4]
    assert run.messages[0].endswith("from step 12")
    assert run.messages[-1].endswith("from step 14")


def test_torchrun_ranks_get_a_new_plan_when_a_machine_is_lost():
    config = RunConfig.model_validate({"plan": "dp_shard=4 zero=3", "launch": {"min_ranks": 2}})
    assert config_for_world_size(config, 4) is config
    assert config_for_world_size(config, 2).plan == "auto"
    assert config_for_world_size(config, 1) is config
    star = config.model_copy(update={"plan": "dp_shard=2 dp_replicate=*"})
    assert config_for_world_size(star, 2) is star
    assert config_for_world_size(star, 3).plan == "auto"


@pytest.mark.parametrize("failure, restarts", [(TYPO, 5), (BAD, 5), (DATA, 5), (DIED, 0)])
def test_recurring_failure_ends_the_run(tmp_path, failure, restarts):
    run = Run(tmp_path, failure, restarts=restarts)
    with pytest.raises(RankFailed):
        run.keep()
    assert (len(run.starts), run.slept) == (1, [])


def test_number_of_restarts_is_limited(tmp_path):
    run = Run(tmp_path, DIED, DIED, DIED, restarts=2)
    with pytest.raises(RankFailed):
        run.keep()
    assert len(run.starts) == 3


def test_paused_run_continues_on_request(tmp_path):
    run = Run(tmp_path, DIED, DIED, None, restarts=1, on_failure="hold")
    assert len(run.keep()) == 3
    assert any("To continue: weft runs resume" in line for line in run.messages)
    assert not (tmp_path / GO_ON).exists()


def test_rank_that_fails_twice_in_a_row_is_excluded(tmp_path):
    run = Run(tmp_path, DIED, DIED, DIED, DIED, None, restarts=9, min_ranks=2)
    assert run.keep() == [4, 4, 3, 3, 2]
    assert run.plans == ["dp_replicate=*"] * 2 + ["auto"] * 3
    assert "rank 1 failed twice in a row: going on with 3 of 4 ranks" in run.messages
    run = Run(tmp_path / "least", DIED, DIED, None, restarts=9, min_ranks=4)
    with pytest.raises(RankFailed):
        run.keep()


def test_fewer_ranks_get_an_automatic_plan_and_the_same_batch():
    config = for_ranks(RunConfig.model_validate({"plan": "tp=2 dp_shard=2", "train": {"global_batch": 12}}), 3)
    assert (config.plan, config.launch.ranks, config.train.global_batch) == ("auto", 3, 12)


def test_data_of_bad_steps_is_left_out(tmp_path):
    run = Run(tmp_path, BAD, Failure(0, 1, kind="E", step=12, in_data=True), None, restarts=2, on_bad="leave_out")
    run.keep()
    assert steps_left_out(run.folder) == {7, 8, 9, 12}
    assert "the data of steps 7 to 9 is left out (train.on_bad=leave_out)" in run.messages


def test_bad_steps_are_repeated_if_configured(tmp_path):
    run = Run(tmp_path, BAD, None, restarts=2, on_bad="restart")
    assert len(run.keep()) == 2
    assert not steps_left_out(run.folder)


def test_step_ranges():
    assert list(step_ranges(0, 5, ())) == [(0, 5)]
    assert list(step_ranges(0, 9, {3, 4, 7})) == [(0, 2), (4, 6), (7, 9)]
    assert list(step_ranges(0, 5, {1, 5})) == [(1, 4), (5, 5)]
    assert list(step_ranges(4, 6, {1, 5, 6, 9})) == [(6, 6)]


def test_damaged_list_of_left_out_steps_is_reported(tmp_path):
    (tmp_path / LEFT_OUT).write_text("[7]")
    with pytest.raises(ConfigError, match="not a list of steps"):
        steps_left_out(RunFolder(tmp_path))
    (tmp_path / LEFT_OUT).unlink()
    leave_out(RunFolder(tmp_path), [3])
    leave_out(RunFolder(tmp_path), [2])
    assert steps_left_out(RunFolder(tmp_path)) == {2, 3}
    assert steps_left_out(RunFolder(tmp_path, {LEFT_OUT: '{"steps": [8]}'})) == {8}


def test_rolled_back_run_does_not_roll_back_again(tmp_path):
    run = Run(tmp_path, 10, DIED, None, restarts=1, step=5)
    run.keep()
    assert run.steps == [5, None]
    made = tmp_path / "early" / "checkpoints" / "step_00000010"
    made.mkdir(parents=True)
    (made / "COMMIT").touch()
    run = Run(tmp_path / "early", DIED, None, restarts=1, step=5)
    run.keep()
    assert run.steps == [5, 5]  # it died before it had gone back


HELD_AT_7 = Failure(0, 3, kind="ActionAsked", message="paused at step 7. To continue: weft runs resume RUN",
                    expected=True, step=7, action="hold")  # fmt: skip
BACK = Failure(0, 75, kind="ActionAsked", message="step 9: going back.", expected=True, step=9, action="roll_back")


def test_requested_pause_waits_and_takes_new_settings(tmp_path):
    run = Run(tmp_path, 7, HELD_AT_7, None)
    run.words = ["optimizer.lr=-3\n", "optimizer.lr=0.5\ntrain.steps=900\n"]
    assert run.keep() == [4, 4]
    assert (run.configs[1].optimizer.lr, run.configs[1].train.steps) == (0.5, 900)
    assert "a number above 0 is needed" in run.messages[1]
    assert not (tmp_path / HELD).exists()
    assert not (tmp_path / GO_ON).exists()
    events = [event for event in read_events(run.folder.events) if event["event"] != "failure"]
    assert [event["event"] for event in events] == ["held", "go_on"]
    assert events[0]["step"] == 7
    assert events[1]["settings"] == ["optimizer.lr=0.5", "train.steps=900"]
    # This is no failure: no restart is counted, and there is no pause before the next start.
    assert not any(event["event"] == "failure" for event in read_events(run.folder.events))


def test_requested_rollback_is_no_failure(tmp_path):
    run = Run(tmp_path, 3, BACK, BACK, None)
    assert run.keep() == [4, 4, 4]
    assert run.messages == ["step 9: going back."] * 2
    assert run.slept == []
