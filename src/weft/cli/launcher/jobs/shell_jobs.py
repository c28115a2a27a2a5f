"""Jobs as shell scripts: SLURM's sbatch, and torchrun on machines of one's own."""

from __future__ import annotations

import shlex

from weft.cli.launcher.jobs.asked import JobAsked, shell_line


def slurm_job(job: JobAsked) -> str:
    """For sbatch: srun starts the ranks. The job is queued again, or the next of an array goes on, until done."""
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
    lines.append(
        f"# {job.warn_s} s before the time limit SLURM sends SIGUSR1; the run saves and ends with exit code 0."
    )
    if job.array:
        lines.append(
            "# The tasks of the array run one after another; each resumes the run, or ends at once if it has finished."
        )
        lines.append(shell_line(run))
    else:
        lines += [
            f"{shell_line(run)} || exit",
            '# Once all steps are done, the last event says "finished"; until then, queue the job again.',
            f'{job.is_finished} || scontrol requeue "$SLURM_JOB_ID"',
        ]
    return "\n".join(lines) + "\n"


def torchrun_job(job: JobAsked) -> str:
    """A script to start on each machine at the same time."""
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
    """4 hours as SLURM writes them: 4:00:00."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
