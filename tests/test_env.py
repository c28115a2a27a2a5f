"""The environment: ranks from torchrun and SLURM, folders, and redacted variables."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import weft
from weft import env
from weft.env import RankEnv
from weft.errors import LaunchError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29501",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_ID": "40007",
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in list(env.child_env()):
        if name.startswith(("SLURM_", "WEFT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "XDG_")) or name == "CI":
            monkeypatch.delenv(name)


def set_all(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_process_without_rank_variables_is_no_rank():
    assert env.rank_env() is None
    assert env.launcher_pid() is None


def test_rank_env_of_torchrun(monkeypatch):
    set_all(monkeypatch, TORCHRUN)
    assert env.rank_env() == RankEnv(3, 8, 1, 2, "node0", 29501, "torchrun")
    monkeypatch.setenv("WEFT_LAUNCHED", "4711")
    place = env.rank_env()
    assert place is not None
    assert place.starter == "weft"
    assert env.launcher_pid() == 4711


def test_rank_env_of_only_rank_and_world_size(monkeypatch):
    set_all(monkeypatch, {"RANK": "1", "WORLD_SIZE": "2"})
    assert env.rank_env() == RankEnv(1, 2, 1, 2, "127.0.0.1", 29500, "torchrun")


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("RANK", "first", "RANK=first: it must be a whole number from 0 to 1000000000. "),
        ("RANK", "-1", "RANK=-1: it must be a whole number from 0"),
        ("RANK", "", "RANK=: it must be a whole number from 0"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0: it must be a whole number from 1"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000: it must be a whole number from 1 to 65535"),
        ("LOCAL_RANK", "1.5", "LOCAL_RANK=1.5: it must be a whole number"),
        ("RANK", "8", "RANK=8: there are 8 ranks, counted from 0. "),
        ("LOCAL_RANK", "2", "LOCAL_RANK=2: there are 2 ranks, counted from 0. "),
    ],
)
def test_bad_values_are_one_line_with_a_remedy(monkeypatch, name, value, text):
    set_all(monkeypatch, {**TORCHRUN, name: value})
    with pytest.raises(LaunchError) as caught:
        env.rank_env()
    assert str(caught.value).startswith(text)
    assert str(caught.value).endswith("Start the ranks with torchrun or srun, which set it, or unset it.")


def test_rank_env_of_slurm(monkeypatch):
    set_all(monkeypatch, SLURM)
    assert env.rank_env() == RankEnv(5, 8, 1, 4, "gpu03", 20_000 + 40_007 % 20_000, "slurm")


def test_shell_in_a_slurm_job_is_no_rank(monkeypatch):
    set_all(monkeypatch, {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"})
    assert env.rank_env() is None


def test_single_slurm_task_starts_its_own_ranks(monkeypatch):
    set_all(monkeypatch, {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert env.rank_env() is None


@pytest.mark.parametrize("node, here", [("0", 4), ("1", 4), ("2", 3)])
def test_uneven_slurm_nodes(monkeypatch, node, here):
    uneven = {"SLURM_NTASKS": "11", "SLURM_NNODES": "3", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": node}
    set_all(monkeypatch, {**SLURM, **uneven})
    place = env.rank_env()
    assert place is not None
    assert place.local_world_size == here


def test_invalid_list_of_tasks_is_refused(monkeypatch):
    set_all(monkeypatch, {**SLURM, "SLURM_TASKS_PER_NODE": "four"})
    with pytest.raises(LaunchError, match=r"SLURM_TASKS_PER_NODE=four: not a list"):
        env.rank_env()


def test_jobs_on_one_node_have_different_ports(monkeypatch):
    set_all(monkeypatch, SLURM)
    first = env.rank_env()
    monkeypatch.setenv("SLURM_JOB_ID", "40008")
    second = env.rank_env()
    assert first is not None
    assert second is not None
    assert first.master_port != second.master_port


@pytest.mark.parametrize(
    "listed, first",
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("gpu[003-007,9],login1", "gpu003"),
        ("gpu[9,3-7]", "gpu9"),
        ("rack[1-2]node[05,07]", "rack1node05"),
        ("a[1-2]-ib,b3", "a1-ib"),
        ("n[12]", "n12"),
        ("", ""),
    ],
)
def test_first_host_of_a_slurm_list(listed, first):
    assert env.first_slurm_host(listed) == first


def test_cache_dir(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    assert env.cache_dir() == Path("/home/somebody/.cache/weft")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert env.cache_dir() == Path("/scratch/weft")
    monkeypatch.setenv("WEFT_HOME", "~/weft")
    assert env.cache_dir() == Path("/home/somebody/weft")


@pytest.mark.parametrize("value, ci", [("true", True), ("1", True), ("", False), ("false", False), ("0", False)])
def test_ci(monkeypatch, value, ci):
    monkeypatch.setenv("CI", value)
    assert env.is_ci() is ci


def test_variables_are_set_temporarily_for_children(monkeypatch):
    monkeypatch.setenv("WEFT_A", "before")
    with env.lent_to_children(WEFT_A="inside", WEFT_B="new"):
        assert (env.get("WEFT_A"), env.get("WEFT_B")) == ("inside", "new")
    assert (env.get("WEFT_A"), env.get("WEFT_B", "gone")) == ("before", "gone")


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "db_passwd", "MY_PWD",
     "SSH_AUTH_SOCK", "APIKEY", "SESSION_COOKIE", "GOOGLE_APPLICATION_CREDENTIALS"],
)  # fmt: skip
def test_secret_names(name):
    assert env.is_secret(name)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "KEYBOARD", "TORCH_HOME", "PYTHONPATH", "MONKEY_PATCH", "PWD"])
def test_names_that_are_not_secret(name):
    assert not env.is_secret(name)


def test_report_shows_no_secret(monkeypatch):
    set_all(
        monkeypatch,
        {"WEFT_TOKEN": "abc", "WEFT_URL": "https://me:pass@example.org/x", "WEFT_N": "3", "OTHER": "1"},
    )
    assert env.report(("WEFT_",)) == {
        "WEFT_N": "3",
        "WEFT_TOKEN": "[redacted]",
        "WEFT_URL": "https://[redacted]@example.org/x",
    }


def test_version_is_the_distributions(monkeypatch):
    assert env.weft_version() in (weft.__version__, "not installed")

    def missing(name):
        assert name == "weft-train"
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    assert env.weft_version() == "not installed"


def test_slurm_tasks_of_one_machine_use_loopback(monkeypatch):
    one = {"SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "gpu03", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}
    set_all(monkeypatch, {**SLURM, **one})
    assert env.rank_env() == RankEnv(1, 4, 1, 4, "127.0.0.1", 20_000 + 40_007 % 20_000, "slurm")
