"""What a job is to be, whatever starts it, and the command lines that all kinds of jobs share."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.spec.plan import Plan, is_auto

if TYPE_CHECKING:
    from weft.spec import RunConfig

#: torchrun passes these on to the ranks; without SIGUSR1 in the list that signal would end it unsaved.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
#: Restarts of all ranks by torchrun after one has failed; each resumes from the newest checkpoint.
_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class JobAsked:
    """train: what follows `weft train`: the config file and settings. events: the run's event log, from workdir.

    time_s: the scheduler's limit for one job, or None. warn_s: so long before it the run saves and stops. workdir: the
    folder on storage that all machines share. head: the first machine's name, where it is known.
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
        """The name as Kubernetes and others allow it: at most 50 small letters, digits and dashes."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:50].strip("-")
        return plain if plain[:1].isalpha() else f"weft-{plain}".strip("-")

    @property
    def train_words(self) -> list[str]:
        """`weft train ...`."""
        return ["weft", "train", *self.train]

    @property
    def limit_comment(self) -> str:
        """A comment for jobs whose scheduler gives no warning before it ends them."""
        if self.time_s is None:
            return ""
        return (
            f"# The run saves and ends {self.warn_s} s before the limit, finished or not; start it again to resume.\n"
        )

    @property
    def limit_words(self) -> list[str]:
        """The setting that saves and stops before the scheduler's limit."""
        return [] if self.time_s is None else [f"train.max_time={self.time_s - self.warn_s}s"]

    def torchrun_words(self, endpoint: str) -> list[str]:
        """torchrun on one machine; the ranks meet at `endpoint`, which is left as it is."""
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
            *self.limit_words,
        ]

    def entering(self) -> list[str]:
        """Lines of a shell script that go to the shared folder and into the environment."""
        lines = [f"cd {shlex.quote(self.workdir)}"]
        return lines if self.venv is None else [*lines, f"source {shlex.quote(f'{self.venv}/bin/activate')}"]

    @property
    def is_finished(self) -> str:
        """A shell command that succeeds once all steps are done."""
        return f"tail -n 1 {shlex.quote(self.events)} 2>/dev/null | grep -q '\"finished\"'"


def shell_line(words: Sequence[str]) -> str:
    """Words as a line of a shell script; a variable such as "$HEAD" in one stays a variable."""
    return " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)


def check_asked(config: RunConfig, job: JobAsked) -> None:
    """ConfigError or PlanError where the config does not suit the machines."""
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
