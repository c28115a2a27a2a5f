"""`weft launch`: the text of each kind of job, checked by the parser that reads it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from weft.cli.app import run
from weft.cli.launch.jobs import MAKERS

GOLDEN = Path(__file__).parent / "jobs"
ASKED = ["--nodes", "4", "--time", "4h", "--workdir", "/shared/work", "--venv", "/shared/venv"]
#: The documented options of sbatch that jobs here use.
SBATCH = {
    "job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "requeue", "open-mode", "array",
    "output",
}  # fmt: skip


@pytest.fixture
def text(tmp_path, monkeypatch, capsys):
    """Return a function that makes the text of a job for a run named after its file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big.toml").write_text('plan = "dp_shard=* zero=3"\n[train]\nsteps = 500\n')

    def make(kind: str, *options: str) -> str:
        image = ["--container", "registry.local/weft:1"] if kind == "kubernetes" else []
        assert run(["launch", kind, "big.toml", "optimizer.lr=1e-4", *ASKED, *image, *options]) == 0
        return capsys.readouterr().out

    return make


@pytest.mark.parametrize("kind", MAKERS)
def test_job_text_equals_the_golden_file(text, kind):
    assert text(kind) == (GOLDEN / f"{kind}.txt").read_text()


@pytest.mark.parametrize("options", [[], ["--array", "5"], ["--container", "weft:1"]])
def test_slurm_job_has_valid_options_and_bash_syntax(text, options):
    job = text("slurm", *options)
    options_used = [line.removeprefix("#SBATCH --") for line in job.splitlines() if line.startswith("#SBATCH")]
    assert {one.partition("=")[0] for one in options_used} <= SBATCH
    assert not any(line.startswith("#SBATCH") for line in job.partition("\n\n")[2].splitlines())
    assert subprocess.run(["bash", "-n"], input=job.encode(), capture_output=True).stderr == b""


@pytest.mark.parametrize(("last", "code", "queued"), [("finished", 0, False), ("asked", 0, True), ("asked", 3, False)])
def test_slurm_job_is_requeued_until_the_run_is_finished(text, tmp_path, last, code, queued):
    job = text("slurm").replace("/shared/work", str(tmp_path)).replace("source /shared/venv/bin/activate\n", "")
    events = tmp_path / "runs" / "big" / "events.jsonl"
    events.parent.mkdir(parents=True)
    events.write_text('{"event":"start"}\n' + json.dumps({"event": "end", "reason": last}) + "\n")
    mark = tmp_path / "told"
    for name, body in (("srun", f'echo "$@" > {mark}.srun; exit {code}'), ("scontrol", f'echo "$@" > {mark}')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    assert subprocess.run(["bash"], input=job.encode(), env=environment).returncode == code
    assert mark.exists() == queued
    assert not queued or mark.read_text() == "requeue 77\n"
    assert Path(f"{mark}.srun").read_text() == "--kill-on-bad-exit=1 weft train big.toml optimizer.lr=1e-4\n"


def check_torchrun(words: list[str], endpoint: str) -> None:
    """Check the command with torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    assert words[0] == "torchrun"
    found = get_args_parser().parse_args(words[1:])
    assert (found.nnodes, found.nproc_per_node, found.rdzv_backend, found.rdzv_id) == ("4", "8", "c10d", "big")
    assert (found.rdzv_endpoint, found.max_restarts, found.module) == (endpoint, 3, True)
    assert "SIGUSR1" in found.signals_to_handle.split(",")
    assert found.training_script == "weft"
    assert found.training_script_args == ["train", "big.toml", "optimizer.lr=1e-4", "train.max_time=14100s"]


def test_torchrun_parses_its_command(text):
    job = text("torchrun", "--head", "node-1")
    assert subprocess.run(["bash", "-n"], input=job.encode(), capture_output=True).stderr == b""
    assert "HEAD=node-1\n" in job
    check_torchrun(shlex.split(job.splitlines()[-1])[1:], "$HEAD:29500")


def test_kubernetes_job_resolves_its_head(text):
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all(text("kubernetes"))
    assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"] == "big"
    pod = job["spec"]["template"]["spec"]
    check_torchrun(pod["containers"][0]["command"], "big-0.big:29500")
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert {one["name"] for one in pod["containers"][0]["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_kubernetes_job_is_valid_by_schema(text):
    validate = pytest.importorskip("kubernetes_validate")
    import yaml

    for one in yaml.safe_load_all(text("kubernetes")):
        validate.validate(one, "1.29", strict=True)


#: Keys of a task in SkyPilot's YAML reference.
SKY = {"name", "num_nodes", "resources", "volumes", "run"}
SKY_RESOURCES = {"accelerators", "cpus", "image_id", "job_recovery"}


def test_skypilot_task_has_documented_keys(text):
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load(text("skypilot", "--container", "weft:1"))
    assert task.keys() <= SKY
    assert task["resources"].keys() <= SKY_RESOURCES
    assert task["resources"]["accelerators"] == "H100:8"
    assert subprocess.run(["bash", "-n"], input=task["run"].encode(), capture_output=True).stderr == b""
    check_torchrun(shlex.split(task["run"].splitlines()[-1]), "$HEAD:29500")


class FakeRay(types.ModuleType):
    """Runs tasks immediately; the first `losses` of them lose their machine."""

    def __init__(self, losses: int):
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayError=RuntimeError)
        self.util = types.SimpleNamespace(remove_placement_group=lambda group: None)
        self.losses = losses

    def init(self) -> None:
        """Do nothing."""

    def get(self, found):
        return found

    def remote(self, **options):
        def wrap(function):
            def call(*arguments):
                if function.__name__ == "train" and self.losses:
                    self.losses -= 1
                    raise RuntimeError("a machine is gone")
                return function(*arguments)

            task = types.SimpleNamespace(remote=call)
            task.options = lambda **_: task
            return task

        return wrap


def test_ray_starts_torchrun_on_each_machine_and_again_after_a_loss(text, monkeypatch):
    ray = FakeRay(losses=1)
    groups, ran = [], []

    def group(bundles, strategy):
        groups.append((bundles, strategy))
        return types.SimpleNamespace(ready=lambda: None)

    modules = {
        "ray": ray,
        "ray.util": types.ModuleType("ray.util"),
        "ray.util.placement_group": types.SimpleNamespace(placement_group=group),
        "ray.util.scheduling_strategies": types.SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *_, **__: None),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "10.0.0.1")
    monkeypatch.setattr(subprocess, "run", lambda words: ran.append(words) or types.SimpleNamespace(returncode=0))
    with pytest.raises(SystemExit) as ended:
        exec(compile(text("ray"), "job.py", "exec"), {"__name__": "__main__"})
    assert ended.value.code == 0
    assert groups == [([{"CPU": 8, "GPU": 8}] * 4, "STRICT_SPREAD")] * 2
    assert len(ran) == 4
    assert ran[0][:3] == ["bash", "-c", 'set -e && cd /shared/work && source /shared/venv/bin/activate && exec "$@"']
    check_torchrun(ran[0][4:], "10.0.0.1:29500")


def test_jobs_without_gpus_request_none(text):
    assert "gpu" not in text("slurm", "launch.device=cpu")
    assert "nvidia.com/gpu" not in text("kubernetes", "launch.device=cpu")
    assert "GPUS, CPUS, PORT, TRIES = 4, 0, 8" in text("ray", "launch.device=cpu")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slrm", "big.toml"], "KIND=slrm: unknown launcher. Did you mean 'slurm'?"),
        (["slurm", "train.steps=5"], "CONFIG: a job needs a config file."),
        (["kubernetes", "big.toml"], "--container: a pod needs an image. Use --container IMAGE"),
        (["slurm", "big.toml", "plan=dp_replicate=2"], "plan=dp_replicate=2: it needs 2 ranks, and --nodes=1 with"),
        (["slurm", "big.toml", "--time", "1min"], "--time 60s: the run stops --warn=300 s before the limit"),
        (["slurm", "big.toml", "--time", "soon"], "--time soon: "),
    ],
)  # fmt: skip
def test_errors_are_one_line(text, capsys, words, message):
    assert run(["launch", *words]) == 2
    assert message in capsys.readouterr().err
