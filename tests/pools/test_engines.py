"""Pools on Dask, with a real scheduler and two workers, and on Slurm, with submitit and recorded commands."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import weft
from tests.pools import work
from weft import env
from weft.errors import ConfigError, MissingExtra, PoolError, TasksFailed
from weft.pools.engines import PoolEngine, SubmititExecutor

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


def free_port() -> int:
    with socket.socket() as server:
        server.bind((env.LOOPBACK, 0))
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def dask() -> Iterator[str]:
    """Yield the address of a scheduler with two workers of one thread, one of which has two GPUs by its own account."""
    address = f"{env.LOOPBACK}:{free_port()}"
    host, port = address.split(":")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": env.child_env(OMP_NUM_THREADS="1")}
    words = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", host, "--port", port, "--no-dashboard"]
    processes = [subprocess.Popen(words, cwd=ROOT, **quiet)]
    words = [sys.executable, "-m", "distributed.cli.dask_worker", f"tcp://{address}", "--nthreads=1", "--no-dashboard"]
    processes += [
        subprocess.Popen([*words, *more], cwd=ROOT, **quiet) for more in (["--resources", "GPU=2"], ["--no-nanny"])
    ]
    from distributed import Client

    with Client(f"tcp://{address}", timeout="30s", set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    yield address
    for process in reversed(processes):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait()


def test_dask(dask, tmp_path):
    with weft.pool(f"dask:{dask}", timeout=1, retries=1) as pool:
        assert pool.map(work.square, range(50)) == [x * x for x in range(50)]
        with pytest.raises(TasksFailed) as caught:
            pool.map(work.misbehave, ["a", "die", "raise", "orphans", "b"], tmp_path)
    assert caught.value.results == ["a", None, None, None, "b"]
    assert caught.value.errors[3] == "it took more than 1 s and was killed"
    end = time.monotonic() + 10
    while any("61.75" in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.full
def test_a_lost_dask_worker_and_a_lost_scheduler(tmp_path):
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": ROOT}
    address = f"{env.LOOPBACK}:{free_port()}"
    words = [
        "distributed.cli.dask_scheduler",
        "--host",
        env.LOOPBACK,
        "--port",
        address.split(":")[1],
        "--no-dashboard",
    ]
    scheduler = subprocess.Popen([sys.executable, "-m", *words], **quiet)
    words = ["distributed.cli.dask_worker", f"tcp://{address}", "--nthreads=1", "--no-dashboard", "--no-nanny"]
    workers = [subprocess.Popen([sys.executable, "-m", *words], **quiet) for _ in range(2)]
    try:
        with weft.pool(f"dask:{address}") as pool:
            threading.Timer(3.0, workers[0].kill).start()
            assert pool.map(work.slow_square, range(200)) == [x * x for x in range(200)]
        threading.Timer(3.0, scheduler.kill).start()
        with weft.pool(f"dask:{address}") as pool, pytest.raises(PoolError, match="to the Dask scheduler was lost"):
            pool.map(work.slow_square, range(2000), tmp_path)
    finally:
        for process in (scheduler, *workers):
            process.kill()
            process.wait()
    with weft.pool("local:2") as pool:  # another engine continues
        assert pool.map(work.slow_square, range(2000), tmp_path) == [x * x for x in range(2000)]


def test_dask_resources_and_addresses(dask, monkeypatch):
    monkeypatch.setattr("weft.pools.engines._CONNECT_S", "500ms")
    with weft.pool(f"dask:{dask}", gpus=2) as pool:
        assert pool.map(work.square, [3]) == [9]
    with (
        weft.pool(f"dask:{dask}", gpus=4) as pool,
        pytest.raises(PoolError, match='Start one with --resources "GPU=4"'),
    ):
        pool.map(work.square, [3])
    with weft.pool(f"dask:{env.LOOPBACK}:1") as pool, pytest.raises(PoolError, match="no Dask scheduler answers there"):
        pool.map(work.square, [3])


@pytest.mark.full
def test_submitit_runs_jobs(tmp_path, monkeypatch):
    import submitit

    def open_local(request, folder):
        executor = submitit.LocalExecutor(folder / "slurm")
        executor.update_parameters(timeout_min=1)
        jobs = SubmititExecutor(executor, folder / "slurm")
        return PoolEngine(jobs, 2, lambda: jobs.shutdown(cancel_futures=True))

    monkeypatch.setattr("weft.pools.pool.open_engine", open_local)
    monkeypatch.chdir(ROOT)
    with weft.pool("slurm:any", timeout=20, retries=0) as pool, pytest.raises(TasksFailed) as caught:
        pool.map(work.misbehave, ["a", "raise", "b"], tmp_path)
    assert caught.value.results == ["a", None, "b"]
    assert caught.value.errors == {1: "ValueError: no good"}


#: A cluster of one machine. `sbatch` records its script and runs it; the script calls srun.
COMMANDS = {
    "sbatch": """#!/bin/bash
exec 9>"$FAKE/lock"; flock 9
id=$(( $(cat "$FAKE/last" 2>/dev/null || echo 100) + 1 )); echo $id > "$FAKE/last"
cp "$1" "$FAKE/$id.sh"
[ -n "$FAKE_REFUSES" ] && { echo "sbatch: error: invalid partition specified: nope" >&2; exit 1; }
SLURM_JOB_ID=$id SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NUM_NODES=1 \\
SLURM_JOB_NODELIST=here setsid bash "$1" >/dev/null 2>&1 9>&- & echo $! > "$FAKE/$id.pid"
echo "Submitted batch job $id"
""",
    "srun": """#!/bin/bash
while [ "${1#--}" != "$1" ]; do case "$1" in --output|--error) shift;; esac; shift; done
exec "$@"
""",
    "sacct": """#!/bin/bash
echo "JobID|State|NodeList"
for pid in "$FAKE"/*.pid; do
  id=$(basename $pid .pid); kill -0 $(cat $pid) 2>/dev/null && echo "$id|RUNNING|here" || echo "$id|FAILED|here"
done
""",
    "scancel": """#!/bin/bash
echo "$1" >> "$FAKE/cancelled"; kill -9 -- -$(cat "$FAKE/$1.pid") 2>/dev/null; true
""",
}


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Put the commands of a Slurm of one machine on the path, and return the folder of their records."""
    fake = tmp_path / "cluster"
    fake.mkdir()
    for name, text in COMMANDS.items():
        (fake / name).write_text(text)
        (fake / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(fake))
    monkeypatch.chdir(ROOT)
    return fake


@pytest.mark.full
def test_a_lost_slurm_job_is_submitted_again(slurm, tmp_path):
    once = str(tmp_path / "once")
    with weft.pool("slurm:gpu:2", timeout="20s") as pool:
        assert pool.map("tests.pools.work:kill_parent_once", [once, "x"], tmp_path / "out") == ["second", "first"]
    assert len(list(slurm.glob("*.sh"))) == 3


def test_slurm_jobs(slurm, tmp_path):
    with weft.pool("slurm:gpu:2", timeout="20s", cores=3, gpus=1) as pool:
        assert pool.map(work.square, [3], tmp_path / "out") == [9]
    scripts = list(slurm.glob("*.sh"))
    lines = set(scripts[0].read_text().splitlines())
    assert lines >= {
        "#SBATCH --partition=gpu",
        "#SBATCH --time=6",
        "#SBATCH --cpus-per-task=3",
        "#SBATCH --gpus-per-node=1",
        "#SBATCH --job-name=weft-map",
    }


@pytest.mark.full
def test_slurm_jobs_of_a_killed_command_are_cancelled(slurm, tmp_path):
    (tmp_path / "items.jsonl").write_text('"a"\n"hang"\n')
    words = ["--over", str(tmp_path / "items.jsonl"), "--out", str(tmp_path / "out"), "--on", "slurm:gpu"]
    words += ["--timeout", "5s", "--retries", "0"]
    command = [sys.executable, "-m", "weft", "map", "tests.pools.work:misbehave", *words]
    first = subprocess.Popen(command, env=env.child_env(CI="true"), stderr=subprocess.DEVNULL)
    while not (tmp_path / "out" / "map.json").exists():
        time.sleep(0.1)
    first.kill()
    first.wait()
    done = subprocess.run(command, env=env.child_env(CI="true"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "item 1: it took more than 5 s and was killed" in done.stderr
    assert (slurm / "cancelled").read_text().split()[:2] == ["101", "102"]
    journal = [json.loads(line[9:]) for line in (tmp_path / "out" / "journal.jsonl").read_text().splitlines()]
    assert [one["item"] for one in journal] == [0, 1]


def test_slurm_refusals(slurm, tmp_path, monkeypatch):
    with weft.pool("slurm:gpu", timeout="1h") as pool:
        monkeypatch.setenv("FAKE_REFUSES", "1")
        with pytest.raises(PoolError, match=r"Slurm rejected a job: .*invalid partition.* Check partition and limits"):
            pool.map(work.square, [1], tmp_path / "out")
    (slurm / "srun").unlink()
    with weft.pool("slurm:gpu", timeout="1h") as pool:
        if shutil.which("srun") is None:
            with pytest.raises(PoolError, match=r"this machine has no srun\. Run the command on a login node"):
                pool.map(work.square, [1], tmp_path / "out")
        with pytest.raises(ConfigError, match="Slurm's jobs need a folder that all nodes share"):
            pool.map(work.square, [1])


@pytest.mark.parametrize(
    ("on", "library", "extra"), [("slurm:gpu", "submitit", "slurm"), ("dask:h:1", "distributed", "dask")]
)
def test_missing_libraries(on, library, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with weft.pool(on, timeout="1h") as pool, pytest.raises(MissingExtra) as caught:
        pool.map(work.square, [1], tmp_path / "out")
    assert str(caught.value).endswith(f'In a checkout of Weft, run: pip install -e ".[{extra}]".')
