"""The only reader of os.environ.

| variable | meaning |
|---|---|
| RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT | set by torchrun for each rank |
| SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID | set by srun for each task |
| TORCHELASTIC_RUN_ID | set by torch's elastic launcher |
| WEFT_HOME | where tokenised data and profiles are kept (default: $XDG_CACHE_HOME/weft or ~/.cache/weft) |
| WEFT_LAUNCHED | set by `weft train` for the ranks it starts itself |
| NO_COLOR, CI, COLUMNS | respected by the terminal output |
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Who this process is, as its starter said."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    starter: str  # "weft", "torchrun" or "slurm"


def rank_env() -> RankEnv | None:
    """This process's place among the ranks, or None when nobody started it as a rank."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        world_size = int(env["WORLD_SIZE"])
        return RankEnv(
            rank=int(env["RANK"]),
            world_size=world_size,
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", world_size)),
            master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
            master_port=int(env.get("MASTER_PORT", "29500")),
            starter="weft" if "WEFT_LAUNCHED" in env else "torchrun",
        )
    # A bare `sbatch` or `salloc` shell has SLURM_NTASKS too; only a task started by srun has a step id.
    if "SLURM_PROCID" in env and "SLURM_STEP_ID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        world_size = int(env["SLURM_NTASKS"])
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
        num_nodes = max(1, int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1"))))
        return RankEnv(
            rank=int(env["SLURM_PROCID"]),
            world_size=world_size,
            local_rank=int(env.get("SLURM_LOCALID", "0")),
            local_world_size=max(1, world_size // num_nodes),
            master_addr=env.get("MASTER_ADDR", first_slurm_host(nodes)),
            # Jobs that share a node must not share a port: derive it from the job's number.
            master_port=int(env.get("MASTER_PORT", 20_000 + int(env.get("SLURM_JOB_ID", "0")) % 20_000)),
            starter="slurm",
        )
    return None


def first_slurm_host(nodelist: str) -> str:
    """First host of SLURM's compressed list: 'gpu[003-007,9],login1' -> 'gpu003'."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,]*))?", nodelist)
    if match is None:
        return nodelist
    prefix, ranges, suffix = match.groups()
    return prefix + re.split(r"[,-]", ranges)[0] + (suffix or "") if ranges else prefix


def export_rank(place: RankEnv) -> None:
    """Give torch.distributed the variables its env:// rendezvous reads (srun does not set them)."""
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.local_rank),
        LOCAL_WORLD_SIZE=str(place.local_world_size),
        MASTER_ADDR=place.master_addr,
        MASTER_PORT=str(place.master_port),
    )


def child_env(**extra: str) -> dict[str, str]:
    """A copy of the environment for a child process, with `extra` on top."""
    return {**os.environ, **extra}


def set_for_children(**extra: str) -> None:
    """Set variables that children started by another library will inherit."""
    os.environ.update(extra)


def cache_dir() -> Path:
    """Where tokenised data and machine profiles are kept between runs."""
    if "WEFT_HOME" in os.environ:
        return Path(os.environ["WEFT_HOME"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "weft"


def is_ci() -> bool:
    """True under a CI system, where progress bars are noise."""
    return bool(os.environ.get("CI"))


def get(name: str, default: str = "") -> str:
    """One variable by name, for reports such as `weft doctor`."""
    return os.environ.get(name, default)
