"""Preparation in another process has the same results and errors as in this one."""

import signal
from contextlib import closing
from pathlib import Path

import pytest

from weft.cli.launch.fork_server import ForkServer
from weft.cli.launch.start import Preparation, Programs, outcome
from weft.config.run_config import RunConfig
from weft.errors import (
    CheckpointError,
    ConfigError,
    LaunchError,
    MissingExtra,
    PlanError,
    Problem,
    UnfitError,
    WeftError,
)
from weft.train.folder import RunFolder


class OwnError(UnfitError):
    exit_code = 3


ERRORS = [
    ConfigError([Problem("optimizer.lr", "too large.", "train.toml:3"), Problem("plan", "tp=3: no.")]),
    PlanError("pp=2: no."),
    CheckpointError("nothing here."),
    MissingExtra("torchao", "ao", "adapter.base=nf4"),
]


@pytest.mark.parametrize("error", [*ERRORS, OwnError("not finite.")], ids=lambda error: type(error).__name__)
def test_errors_are_passed_on_completely(monkeypatch, error):
    def prepare_stub(asked: Preparation) -> RunFolder:
        raise error

    monkeypatch.setattr(Preparation, "prepare_locally", prepare_stub)
    answer = Preparation(RunConfig(), 2, 2).answered()
    with pytest.raises(WeftError) as raised:
        outcome(answer, 0)
    assert type(raised.value) is (UnfitError if isinstance(error, OwnError) else type(error))
    assert (str(raised.value), raised.value.exit_code) == (str(error), error.exit_code)
    assert getattr(raised.value, "problems", ()) == getattr(error, "problems", ())


def test_preparation_request_round_trips():
    config = RunConfig.model_validate({"model": {"path": "a/b"}, "plan": "tp=2", "train": {"steps": 3}})
    asked = Preparation(config, 4, 2, replica=1, num_replicas=2)
    assert Preparation.read(asked.written()) == asked
    assert asked.loads_torch
    assert not Preparation(RunConfig(), 1, 1).loads_torch


#: Modules that each preparation needs. Without them each fork would import them.
LOADED = ["weft.cli.launch.start", "weft.train.preparation"]
#: User tasks whose files cause the failures that a preparation may have.
ACTS = {
    "tells": (
        "import os\nprint('parent', open(f'/proc/{os.getppid()}/comm').read())\nTask = None",
        ConfigError,
        "Task",
    ),
    "leaves": ("import sys\nsys.exit(7)", SystemExit, "7"),
    "fails": ("import os\nos._exit(9)", SystemExit, "9"),
    "is killed": (f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})", LaunchError, "SIGKILL ended the process"),
}


def test_forked_preparation_reports_any_outcome(tmp_path: Path, capfd):
    with closing(ForkServer(tmp_path, {}, LOADED, Programs(["/no/such/program"]))) as server:
        for name, (code, kind, text) in ACTS.items():
            task = tmp_path / f"{name.replace(' ', '_')}.py"
            task.write_text(code)
            config = RunConfig.model_validate(
                {
                    "run": {"dir": str(tmp_path), "name": "run"},
                    "task": {"name": f"{task}:Task"},
                    "plan": "dp_replicate=1",
                }
            )
            with pytest.raises(kind, match=text):
                server.prepare(Preparation(config, 1, 1))
        assert capfd.readouterr().out.split()[:2] == ["parent", "weft-fork"]
        assert not (tmp_path / "run").exists()

        server._process.kill()
        task.write_text("raise ImportError('in this process')")
        with pytest.raises(ConfigError, match="in this process"):
            server.prepare(Preparation(config, 1, 1))
