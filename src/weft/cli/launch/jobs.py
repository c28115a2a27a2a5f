"""`weft launch`: job scripts for several machines, and their common command lines."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.console import seconds_of
from weft.config.fields.plan_text import is_auto
from weft.config.plan import Plan
from weft.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from weft.config.run_config import RunConfig

#: Signals that torchrun forwards to the ranks. Without SIGUSR1 in the list, that signal would end the run unsaved.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
#: Number of restarts by torchrun after a failure. Each one resumes from the newest checkpoint.
_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class JobAsked:
    """A requested job.

    Attributes:
        train: arguments of `weft train`: the config file and settings.
        events: the run's event log, relative to workdir.
        nodes, ranks: number of machines, and of ranks on each.
        time_s: the scheduler's time limit for one job, or None.
        warn_s: time before the limit at which the run saves and stops.
        workdir: folder on storage that all machines share.
        head: name of the first machine, or None.
        port: port of the rendezvous on the first machine.
        array: number of tasks of a SLURM job array, or None to requeue the job instead.
        gpu, claim: kind of GPU (SkyPilot), and volume to mount at workdir (Kubernetes, SkyPilot).
    """

    name: str
    train: tuple[str, ...]
    events: str
    nodes: int
    ranks: int
    on_gpus: bool = True
    time_s: int | None = None
    warn_s: int = 300
    workdir: str = "."
    venv: str | None = None
    container: str | None = None
    head: str | None = None
    port: int = 29500
    array: int | None = None
    gpu: str = "H100"
    claim: str = "shared"

    @property
    def label(self) -> str:
        """The name in Kubernetes' format: at most 55 lower-case letters, digits and dashes, beginning with a letter."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:50].strip("-")
        return plain if plain[:1].isalpha() else f"weft-{plain}".strip("-")

    @property
    def train_words(self) -> list[str]:
        """Return `weft train ...` as arguments."""
        return ["weft", "train", *self.train]

    @property
    def limit_comment(self) -> str:
        """Comment about the time limit, for jobs whose scheduler sends no warning before the limit."""
        text = (
            f"# The run saves and ends {self.warn_s} s before the limit, finished or not; start it again to resume.\n"
        )
        return "" if self.time_s is None else text

    def torchrun_words(self, endpoint: str) -> list[str]:
        """Return the torchrun command of one machine as arguments. `endpoint` is the rendezvous address."""
        return [
            "torchrun",
            f"--nnodes={self.nodes}",
            f"--nproc-per-node={self.ranks}",
            f"--rdzv-id={self.label}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            f"--max-restarts={_RESTARTS}",
            f"--signals-to-handle={_SIGNALS}",
            "-m",
            *self.train_words,
            *([] if self.time_s is None else [f"train.max_time={self.time_s - self.warn_s}s"]),
        ]

    def entering(self) -> list[str]:
        """Return lines of a shell script that enter the shared folder and activate the virtual environment, if any."""
        lines = [f"cd {shlex.quote(self.workdir)}"]
        return lines if self.venv is None else [*lines, f"source {shlex.quote(f'{self.venv}/bin/activate')}"]


def shell_line(words: Sequence[str]) -> str:
    """Return arguments as a line of a shell script. Variables such as "$HEAD" are expanded by the shell."""
    return " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)


def check_asked(config: RunConfig, job: JobAsked) -> None:
    """Raise ConfigError or PlanError if the config does not fit the machines or the time limit."""
    world_size, launch = job.nodes * job.ranks, config.launch
    if launch.replicas_apart and launch.replica is None:
        raise ConfigError(
            "launch.replicas_apart=true: a job starts one world. Print a job for each replica, with "
            "launch.replica=0, 1, ... and launch.meet_at=HOST:PORT."
        )
    if not is_auto(config.plan):
        plan = Plan.parse(config.plan, world_size)
        needed = plan.world_size // (plan.dp_replicate if launch.replicas_apart else 1)
        if needed != world_size:
            raise ConfigError(
                f"plan={config.plan}: it needs {needed} ranks, and --nodes={job.nodes} with {job.ranks} "
                f"ranks each gives {world_size}. Change --nodes or --gpus-per-node, or use a '*' in the plan."
            )
    if job.time_s is not None and job.time_s <= job.warn_s:
        raise ConfigError(
            f"--time {job.time_s}s: the run stops --warn={job.warn_s} s before the limit, which leaves no time to "
            "train. Give more time, or a smaller --warn."
        )


# Jobs for Kubernetes, SkyPilot and Ray.

#: Seconds from SIGTERM to SIGKILL. They must suffice for a step and a checkpoint.
_GRACE_S = 600
#: Maximum number of restarts of the job on a machine. Each of them resumes the run.
_TRIES = 100
#: Maximum number of restarts with Ray, which restarts without a pause.
_RAY_TRIES = 10


def kubernetes_job(job: JobAsked) -> str:
    """Return an indexed Kubernetes Job, and the Service with which its pods find each other. No operator is needed.

    Raise ConfigError if the job has no container image.
    """
    if job.container is None:
        raise ConfigError("--container: a pod needs an image. Use --container IMAGE, an image with Weft installed.")
    words = "\n".join(
        f"            - {json.dumps(word)}" for word in job.torchrun_words(f"{job.label}-0.{job.label}:{job.port}")
    )
    gpus = (
        f"\n          resources:\n            limits:\n              nvidia.com/gpu: {job.ranks}" if job.on_gpus else ""
    )
    limit = f"\n  activeDeadlineSeconds: {job.time_s}" if job.time_s is not None else ""
    return (
        _kubernetes_service(job)
        + f"""\
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.label}
spec:
  completionMode: Indexed
  completions: {job.nodes}
  parallelism: {job.nodes}
  backoffLimit: {_TRIES}{limit}
  template:
    spec:
      subdomain: {job.label}
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: {_GRACE_S}
      containers:
        - name: train
          image: {json.dumps(job.container)}
          workingDir: {json.dumps(job.workdir)}
          command:
{words}{gpus}
          volumeMounts:
            - name: shared
              mountPath: {json.dumps(job.workdir)}
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: shared
          persistentVolumeClaim:
            claimName: {json.dumps(job.claim)}
        - name: shm
          emptyDir:
            medium: Memory
"""
    )


def _kubernetes_service(job: JobAsked) -> str:
    return f"""\
# kubectl apply -f FILE. Kubernetes restarts a pod that ends before the run has finished, and the run resumes.
{job.limit_comment}apiVersion: v1
kind: Service
metadata:
  name: {job.label}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {job.label}
  ports:
    - name: rendezvous
      port: {job.port}
"""


def skypilot_job(job: JobAsked) -> str:
    """Return a task for `sky jobs launch`, which restarts it on other machines after a preemption."""
    place = f"{job.gpu}:{job.ranks}" if job.on_gpus else None
    image = f"\n  image_id: {json.dumps(f'docker:{job.container}')}" if job.container is not None else ""
    accelerators = f"\n  accelerators: {json.dumps(place)}" if place else f"\n  cpus: {json.dumps(f'{job.ranks}+')}"
    run = "\n".join(
        f"  {line}"
        for line in (
            "set -e",
            'HEAD=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
            *job.entering(),
            shell_line(job.torchrun_words(f"$HEAD:{job.port}")),
        )
    )
    return f"""\
# sky jobs launch FILE. SkyPilot replaces preempted machines, and the run resumes.
{job.limit_comment}name: {job.label}
num_nodes: {job.nodes}
resources:{accelerators}{image}
  job_recovery:
    max_restarts_on_errors: {_TRIES}
volumes:
  {json.dumps(job.workdir)}: {json.dumps(job.claim)}
run: |
{run}
"""


def ray_job(job: JobAsked) -> str:
    """Return a Python program for `ray job submit`: torchrun on each machine, restarted on all if one is lost."""
    gpus = job.ranks if job.on_gpus else 0
    words = json.dumps(job.torchrun_words("HEAD"), indent=4)
    enter = " && ".join(["set -e", *job.entering(), 'exec "$@"'])
    return f'''\
# ray job submit --address http://HEAD:8265 --working-dir . -- python THIS_FILE
{job.limit_comment}"""Start torchrun on {job.nodes} machines of a Ray cluster; start all again if one is lost."""

import socket
import subprocess

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES, GPUS, CPUS, PORT, TRIES = {job.nodes}, {gpus}, {job.ranks}, {job.port}, {_RAY_TRIES}
COMMAND = {words}


@ray.remote(num_cpus=CPUS, num_gpus=GPUS, max_retries=0)
def train(head):
    words = [word.replace("=HEAD", f"={{head}}:{{PORT}}") for word in COMMAND]
    return subprocess.run(["bash", "-c", {json.dumps(enter)}, "torchrun", *words]).returncode


@ray.remote(num_cpus=0)
def address():
    return socket.gethostbyname(socket.gethostname())


def once():
    bundle = {{"CPU": CPUS, "GPU": GPUS}} if GPUS else {{"CPU": CPUS}}
    group = placement_group([bundle] * NODES, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready())
        places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node) for node in range(NODES)]
        head = ray.get(address.options(scheduling_strategy=places[0]).remote())
        return max(ray.get([train.options(scheduling_strategy=place).remote(head) for place in places]))
    except ray.exceptions.RayError as error:
        print(error)
        return 1
    finally:
        ray.util.remove_placement_group(group)


ray.init()
for _ in range(TRIES):
    code = once()
    if code == 0:
        break
raise SystemExit(code)
'''


# Jobs as shell scripts: SLURM's sbatch, and torchrun on your own machines.


def slurm_job(job: JobAsked) -> str:
    """Return a script for sbatch, in which srun starts the ranks.

    The job is requeued, or continued by the next task of a job array.
    """
    options = [
        f"--job-name={job.label}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks}",
        *([f"--gpus-per-node={job.ranks}"] if job.on_gpus else []),
        *([f"--time={_clock(job.time_s)}"] if job.time_s is not None else []),
        f"--signal=USR1@{job.warn_s}",
        "--requeue",
        "--open-mode=append",
        *([f"--array=1-{job.array}%1", "--output=%x-%A.log"] if job.array else ["--output=%x-%j.log"]),
    ]
    inside = []
    if job.container is not None:
        inside = [f"--container-image={job.container}", f"--container-mounts={job.workdir}:{job.workdir}"]
        inside += [f"--container-workdir={job.workdir}"]
    run = ["srun", "--kill-on-bad-exit=1", *inside, *job.train_words]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), "", *job.entering()]
    warning = f"# {job.warn_s} s before the time limit SLURM sends SIGUSR1; the run saves and ends with exit code 0."
    if job.array:
        comment = "# The tasks of the array run one after another; each resumes the run, or ends if it has finished."
        return "\n".join([*lines, warning, comment, shell_line(run)]) + "\n"
    is_finished = f"tail -n 1 {shlex.quote(job.events)} 2>/dev/null | grep -q '\"finished\"'"
    lines += [
        warning,
        f"{shell_line(run)} || exit",
        '# The last event is "finished" after all steps. Until then, queue the job again.',
        f'{is_finished} || scontrol requeue "$SLURM_JOB_ID"',
    ]
    return "\n".join(lines) + "\n"


def torchrun_job(job: JobAsked) -> str:
    """Return a script to start on each machine at the same time."""
    head = shlex.quote(job.head) if job.head is not None else '"${1:?give the name of the first machine}"'
    lines = [
        "#!/bin/bash",
        f"# Start this on each of the {job.nodes} machines, with the name of the first one. Repeat it to resume.",
        *job.limit_comment.splitlines(),
        "set -e",
        f"HEAD={head}",
        *job.entering(),
    ]
    lines.append(f"exec {shell_line(job.torchrun_words(f'$HEAD:{job.port}'))}")
    return "\n".join(lines) + "\n"


def _clock(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


# `weft launch`.

MAKERS: dict[str, Callable[[JobAsked], str]] = {
    "slurm": slurm_job,
    "torchrun": torchrun_job,
    "kubernetes": kubernetes_job,
    "skypilot": skypilot_job,
    "ray": ray_job,
}


def launch(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(MAKERS)}.")],
    words: Annotated[
        list[str], typer.Argument(metavar="CONFIG.toml [key=value ...]", help="The run's config file, and settings.")
    ],
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Ranks per machine, one per GPU.")] = 8,
    time: Annotated[
        str | None, typer.Option(help="Time limit of one job in the scheduler, such as 4h.", show_default="none")
    ] = None,
    warn: Annotated[str, typer.Option(help="How long before the time limit the run saves and stops.")] = "5min",
    workdir: Annotated[
        Path | None, typer.Option(help="Folder shared by all machines.", show_default="this folder")
    ] = None,
    venv: Annotated[
        Path | None, typer.Option(help="Virtual environment to activate on each machine.", show_default=False)
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(help="Container image with Weft installed; required for kubernetes.", show_default=False),
    ] = None,
    head: Annotated[str | None, typer.Option(help="torchrun: name of the first machine.", show_default=False)] = None,
    array: Annotated[
        int | None,
        typer.Option(min=1, help="slurm: use a job array of this many tasks instead of --requeue.", show_default=False),
    ] = None,
    gpu: Annotated[str, typer.Option(help="skypilot: the kind of GPU.")] = "H100",
    claim: Annotated[str, typer.Option(help="kubernetes, skypilot: the volume to mount at workdir.")] = "shared",
) -> None:
    """Print a job script for several machines, without starting it. The job resumes automatically."""
    from weft.cli.console import split_words
    from weft.config.files import load_config

    if kind not in MAKERS:
        hint = did_you_mean(kind, MAKERS) or f" Use one of: {', '.join(MAKERS)}."
        raise ConfigError(f"KIND={kind}: unknown launcher.{hint}")
    path, overrides = split_words(words)
    if path is None:
        raise ConfigError("CONFIG: a job needs a config file. Give one, such as configs/quickstart.toml.")
    config = load_config(path, overrides).config
    job = JobAsked(
        name=config.run.name,
        train=(str(path), *overrides),
        events=str(Path(config.run.dir) / config.run.name / "events.jsonl"),
        nodes=nodes,
        ranks=gpus_per_node,
        on_gpus=config.launch.device != "cpu",
        time_s=None if time is None else int(seconds_of("--time", time)),
        warn_s=int(seconds_of("--warn", warn)),
        workdir=str((workdir or Path()).absolute()),
        venv=None if venv is None else str(venv),
        container=container,
        head=head,
        array=array,
        gpu=gpu,
        claim=claim,
    )
    check_asked(config, job)
    typer.echo(MAKERS[kind](job), nl=False)
