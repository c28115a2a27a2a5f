"""`weft train`: arguments, the number of ranks, and both kinds of start."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer

from weft.cli import train as verb
from weft.cli.console import split_words
from weft.cli.launch.launch import count_ranks, threads_variables, usable_cores
from weft.cli.launch.spec import LaunchSpec
from weft.comm.mesh import open_store
from weft.comm.store import RankZeroMessage
from weft.config.files import load_config
from weft.config.run_config import RunConfig
from weft.env import RankEnv
from weft.errors import ConfigError, LaunchError, PlanError, WeftError
from weft.train.engine import ReplicaWorld
from weft.train.folder import run_lock

pytestmark = pytest.mark.usefixtures("no_rank_env")


@pytest.fixture
def no_rank_env(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def config(plan: str = "dp_replicate=*", **launch: object) -> RunConfig:
    return RunConfig.model_validate({"plan": plan, "launch": launch})


def test_arguments_with_an_equals_sign_are_settings():
    Path("a.toml").touch()
    Path("odd=name.toml").touch()
    assert split_words([]) == (None, [])
    assert split_words(["train.steps=3", "a.toml", "seed=1"]) == (Path("a.toml"), ["train.steps=3", "seed=1"])
    assert split_words(["odd=name.toml"]) == (Path("odd=name.toml"), [])


@pytest.mark.parametrize(
    "words, text",
    [
        (["quikstart.toml"], "quikstart.toml: there is no such file. Did you mean 'quickstart.toml'?"),
        (["conf/x.toml"], "conf/x.toml: there is no such file. Check the path."),
        (["zzz.toml"], "zzz.toml: there is no such file. Config files there: quickstart.toml."),
        (["steps"], "steps: there is no such file. Write a path to a TOML file, or a setting such as steps=..."),
        (["folder"], "folder: this is a folder, not a config file. Give the file inside it."),
        (["run"], "run: this is a folder, not a config file. Use run/config.toml."),
        (
            ["quickstart.toml", "b.toml"],
            "b.toml: a second config file after quickstart.toml. Give one file; settings are written key=value.",
        ),
    ],
)
def test_arguments_that_are_no_file(words, text):
    Path("quickstart.toml").touch()
    Path("folder").mkdir()
    Path("run").mkdir()
    Path("run/config.toml").touch()
    with pytest.raises(ConfigError) as caught:
        split_words(words)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "plan, launch, gpus, cores, ranks",
    [
        ("dp_replicate=*", {}, 0, 2, 2),
        ("dp_replicate=*", {}, 0, 1, 1),
        ("dp_replicate=*", {}, 0, 64, 2),
        ("dp_replicate=*", {}, 8, 64, 8),
        ("dp_replicate=*", {"device": "cpu"}, 8, 64, 2),
        ("dp_replicate=*", {"ranks": 4}, 8, 64, 4),
        ("dp_replicate=*", {"ranks": 4}, 0, 2, 4),
        ("dp_replicate=3", {}, 0, 2, 3),
        ("dp_replicate=2", {}, 8, 64, 2),
        ("", {}, 8, 64, 1),
        ("dp_replicate=* tp=2", {}, 8, 64, 8),
    ],
)
def test_number_of_ranks(plan, launch, gpus, cores, ranks):
    assert count_ranks(config(plan, **launch), gpus, cores) == ranks


@pytest.mark.parametrize(
    "plan, launch, gpus, text",
    [
        ("dp_replicate=*", {"device": "cuda"}, 0, "launch.device=cuda: torch sees no GPU on this machine. Use "),
        ("dp_replicate=8", {"device": "cuda"}, 2, "plan=dp_replicate=8: 8 ranks need 8 GPUs, and torch sees 2 here. "),
        ("dp_replicate=8", {}, 2, "plan=dp_replicate=8: 8 ranks need 8 GPUs, and torch sees 2 here. "),
        ("dp_replicate=*", {"ranks": 4}, 2, "launch.ranks=4: 4 ranks need 4 GPUs, and torch sees 2 here. "),
        ("dp_replicate=2", {"ranks": 4}, 0, "launch.ranks=4: the plan 'dp_replicate=2' needs 2 ranks. "),
    ],
)
def test_machine_without_the_requested_devices(plan, launch, gpus, text):
    with pytest.raises(LaunchError) as caught:
        count_ranks(config(plan, **launch), gpus, 2)
    assert str(caught.value).startswith(text)


def test_star_that_does_not_divide_evenly():
    with pytest.raises(PlanError, match="not a multiple of 4"):
        count_ranks(config("dp_replicate=* tp=4"), 0, 2)


def test_cores_are_divided_unless_the_user_set_threads(monkeypatch):
    assert threads_variables(2, 8) == {"OMP_NUM_THREADS": "4"}
    assert threads_variables(8, 2) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_variables(2, 8) == {}
    assert usable_cores() >= 1


def test_train_without_rank_env_starts_its_ranks(monkeypatch):
    pytest.importorskip("weft.config.files")
    started: list[LaunchSpec] = []
    monkeypatch.setattr(verb, "execute", started.append)
    verb.train(["train.steps=70"])
    assert started[0].config.train.steps == 70
    assert (started[0].rank, started[0].world, started[0].starts_replicas) == (None, None, False)


def test_train_under_torchrun_is_a_rank(monkeypatch):
    pytest.importorskip("weft.config.files")
    started: list[LaunchSpec] = []
    monkeypatch.setattr(verb, "execute", started.append)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    verb.train([])
    place = started[0].rank
    assert place is not None
    assert (place.rank, place.world_size, place.starter) == (1, 2, "torchrun")


def test_launch_spec_round_trips_to_a_child():
    reads, writes = os.pipe()
    spec = LaunchSpec(config(), ["weft", "train"], world=ReplicaWorld(1, "127.0.0.1:5", "k" * 16), prepared=writes)
    given = LaunchSpec.read(io.BytesIO(spec.lines()))
    assert given == spec
    assert not given.starts_replicas
    given.report_prepared()
    assert os.read(reads, 2) == b"1"
    os.close(reads)


AS_RANK = """
import sys
from pathlib import Path
from weft import env
from weft.cli.launch.rank import run_as_rank
from weft.errors import DataError, TrainingHalted
def body(terminal):
    print("into the log")
    if place.rank == 0:
        print("on the terminal", file=terminal)
    raise {error}
place = env.rank_env()
run_as_rank(Path("logs"), place, body)
"""


def as_torchrun_rank(error: str, rank: int = 0) -> subprocess.CompletedProcess[str]:
    from weft import env

    variables = env.child_env(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    code = AS_RANK.format(error=error)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=30, check=False)


def test_torchrun_rank_prints_its_error_and_keeps_its_exit_code():
    done = as_torchrun_rank("TrainingHalted('loss is NaN.')")
    assert done.returncode == 3
    assert done.stdout == "on the terminal\n"
    assert done.stderr == "error: loss is NaN.\n  (rank 0; its output is in logs/rank_0.log)\n"
    assert "into the log" in Path("logs/rank_0.log").read_text()


def test_torchrun_rank_crash_shows_its_traceback():
    done = as_torchrun_rank("ValueError('boom')", rank=1)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "error: rank 1 failed: ValueError: boom\n" in done.stderr


def test_rank_that_lost_its_peer_is_brief():
    done = as_torchrun_rank("RuntimeError('Connection closed by peer')", rank=1)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "rank 1 lost its connection to another rank; see that rank's error."
    assert "Traceback" not in done.stderr


SMALL = ["plan=dp_replicate=2", "launch.device=cpu", "tokenizer.kind=bytes", "train.seq_len=32",
         "train.global_batch=8", "data.train=text.jsonl", "data.cache_dir=cache"]  # fmt: skip


@pytest.fixture
def both_ranks(monkeypatch):
    """Return what both torchrun ranks receive or raise before they connect. Threads replace their processes."""
    Path("text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft"}}\n' for i in range(400)))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # is restored after the test

    def prepare(*overrides: str) -> list[object]:
        config = load_config(None, [*SMALL, *overrides]).config
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def of_rank(rank: int) -> object:
            place = RankEnv(rank, 2, rank, 2, "127.0.0.1", port, "torchrun")
            spec = LaunchSpec(config, ["weft", "train"], place)
            try:
                word = RankZeroMessage(place, open_store(place, 30))
                if rank:
                    return verb._receive_prepared(spec, word).texts
                with contextlib.ExitStack() as held:
                    texts = verb._prepare_on_first_rank(spec, word, held).texts
                    word.wait_until_received()
                    return texts
            except (WeftError, typer.Exit) as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(of_rank, range(2)))

    return prepare


def test_torchrun_ranks_receive_what_rank_0_prepared(both_ranks):
    first, second = both_ranks()
    assert first == second
    assert first["plan.txt"] == Path("runs/quickstart/plan.txt").read_text()


def test_torchrun_ranks_do_not_touch_a_locked_folder(both_ranks):
    both_ranks()
    with run_lock(Path("runs/quickstart")):
        before = {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()}
        first, second = both_ranks("train.steps=7")
        assert {file: file.read_bytes() for file in Path("runs").rglob("*") if file.is_file()} == before
    assert "is training in" in str(first)
    assert second.exit_code == 2  # without a message: rank 0 prints it


def test_launcher_imports_no_torch(tmp_path):
    """Only the agent imports it. Errors are reported before, and no model is imported unnecessarily."""
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "warp {i}, weft"}}\n' for i in range(400)))
    settings = ["plan=dp_replicate=2", "launch.device=cpu", "tokenizer.kind=bytes", "train.seq_len=32",
                "train.global_batch=8", f"data.train={tmp_path / 'text.jsonl'}"]  # fmt: skip
    code = (
        "import sys\nfrom weft.cli import train\nfrom weft.cli.launch import launch\n"
        "launch.launch_ranks = lambda *words, **more: None\n"
        f"train.train({settings!r})\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
