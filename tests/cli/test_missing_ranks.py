"""Ranks that never connect: the message names them, the address and the variables to unset, and the exit code is 2."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weft.comm import mesh, missing_ranks
from weft.comm.mesh import open_store
from weft.env import RankEnv
from weft.errors import CommError, LaunchError

UNSET = "`unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT`"


def rank_env(rank: int, port: int, **more) -> RankEnv:
    return RankEnv(**{"rank": rank, "world_size": 8, "local_rank": rank, "local_world_size": 8,
                      "master_addr": "127.0.0.1", "master_port": port, "starter": "torchrun", **more})  # fmt: skip


@pytest.fixture
def port(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # is restored after the test
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_rank_without_rank_0_reports_and_exits(port, monkeypatch, capsys):
    monkeypatch.setattr(missing_ranks, "NOTICE_S", 0.1)
    with pytest.raises(LaunchError) as caught:
        open_store(rank_env(3, port), 1.0)
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(f"rank 3 of 8 could not connect to rank 0 at 127.0.0.1:{port} within 1.00 s. ")
    assert UNSET in str(caught.value)
    message = capsys.readouterr().err
    assert message.startswith(
        f"weft: rank 3 of 8 waits for rank 0 at 127.0.0.1:{port}. Start all ranks, or type {UNSET}"
    )
    assert message.count("\n") == 1  # and no stacks of torch


def test_rank_0_names_the_missing_ranks(port, monkeypatch):
    monkeypatch.setattr(missing_ranks, "NOTICE_S", 0.2)
    messages = []
    store = open_store(rank_env(0, port), 2.0)
    for rank in (2, 5):
        missing_ranks.note_arrival(store, rank)
    with pytest.raises(LaunchError) as caught:
        mesh.join_ranks(rank_env(0, port), __import__("torch").device("cpu"), 2.0, store, messages.append)
    assert f"rank 0 of 8 could not connect to ranks 1, 3 to 4, 6 to 7 at 127.0.0.1:{port} within 2.00 s" in str(
        caught.value
    )
    assert [line.partition(" at ")[0] for line in messages] == ["rank 0 of 8 waits for ranks 1, 3 to 4, 6 to 7"]


def test_port_in_use_and_unknown_host_are_one_line(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(LaunchError, match=rf"^MASTER_PORT={port}: another program listens at 127.0.0.1:{port}"):
            open_store(rank_env(0, port), 1.0)
    with pytest.raises(LaunchError, match=r"^MASTER_ADDR=no.such.host.invalid: no machine of this name is known"):
        open_store(rank_env(3, port, master_addr="no.such.host.invalid"), 0.5)


def test_ranks_of_weft_train_leave_the_report_to_their_launcher(port):
    assert "torch" in sys.modules
    error = mesh._rendezvous_error(rank_env(1, port, starter="weft"), None, RuntimeError("timed out"), 1.0)
    assert type(error) is CommError
    assert error.exit_code == 1


@pytest.mark.full
@pytest.mark.parametrize(("rank", "whom"), [(3, "rank 0"), (0, "ranks 1 to 7")])
def test_command_exits_with_code_2(rank, whom, port, tmp_path):
    Path(tmp_path / "text.jsonl").write_text('{"text": "warp, weft"}\n' * 400)
    settings = ["plan=dp_replicate=8", "launch.device=cpu", "tokenizer.kind=bytes", "train.seq_len=32",
                "train.global_batch=8", "data.train=text.jsonl", "data.cache_dir=c", "launch.timeout=7s"]  # fmt: skip
    variables = {"RANK": rank, "WORLD_SIZE": 8, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-m", "weft", "train", *settings], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**{key: value for key, value in os.environ.items() if key != "LOCAL_WORLD_SIZE"},
             **{key: str(value) for key, value in variables.items()}},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"waits for {whom} at 127.0.0.1:{port}" in done.stdout + done.stderr
    assert f"could not connect to {whom} at 127.0.0.1:{port} within 7.00 s" in done.stderr
    assert "Traceback" not in done.stderr
