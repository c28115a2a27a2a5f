"""How many ranks `weft train` starts on this machine, and how many threads each gets."""

from __future__ import annotations

import glob
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from weft import env
from weft.errors import LaunchError
from weft.spec.plan import Plan, is_auto

if TYPE_CHECKING:
    from weft.spec import RunConfig

#: What drivers make: NVIDIA's, those of its boards, of Windows' subsystem, and AMD's.
_DEVICE_FILES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/nvgpu*", "/dev/dxg", "/dev/kfd")


def count_ranks(config: RunConfig, gpus: int, cores: int, *, of_one_replica: bool = False) -> int:
    """Return the number of ranks that the plan asks for on a machine.

    Args:
        config: its plan, launch.device and launch.ranks.
        gpus: visible GPUs.
        cores: usable cores.
        of_one_replica: the machine starts one replica of the plan, and other machines the others.

    Raises:
        LaunchError: where the machine lacks what was asked for.
        PlanError: where a '*' does not come out even.
    """
    device, wanted = config.launch.device, config.launch.ranks
    if device == "cuda" and gpus == 0:
        raise LaunchError(
            "launch.device=cuda: torch sees no GPU on this machine. "
            "Use launch.device=cpu, or run `weft doctor` to see why."
        )
    on_gpus = device != "cpu" and gpus > 0
    room = gpus if on_gpus else min(2, cores)
    stands_for = room if wanted == "all" else wanted
    if is_auto(config.plan):
        num_ranks = stands_for
    else:
        plan = Plan.parse(config.plan, stands_for)
        num_ranks = plan.world_size // plan.dp_replicate if of_one_replica else plan.world_size
    if wanted not in ("all", num_ranks):
        raise LaunchError(
            f"launch.ranks={wanted}: the plan {config.plan!r} needs {num_ranks} ranks. "
            f"Use launch.ranks={num_ranks}, or leave it out."
        )
    if on_gpus and num_ranks > gpus:
        cause = f"plan={config.plan}" if wanted == "all" else f"launch.ranks={wanted}"
        raise LaunchError(
            f"{cause}: {num_ranks} ranks need {num_ranks} GPUs, and torch sees {gpus} here. "
            f"Use a plan for {gpus}, launch.device=cpu, or start the ranks on more machines with torchrun or srun."
        )
    return num_ranks


def process_age_s() -> float:
    """Return the seconds since this process was started: what a time limit has already used up."""
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())


def threads_variables(num_ranks: int, cores: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each rank: its share of the cores, unless the user has set it."""
    if env.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // num_ranks))}


def visible_gpus() -> int:
    """Count the GPUs that torch may use here, after CUDA_VISIBLE_DEVICES; does not start CUDA in this process.

    Where the system has no file of such a device there is none, and torch need not be loaded to say so.
    """
    if sys.platform == "linux" and not any(glob.glob(pattern) for pattern in _DEVICE_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def usable_cores() -> int:
    """Return the number of cores this process may run on: its affinity, and no more than the container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _quota_cores(cores)))


def _quota_cores(otherwise: int) -> int:
    """The cgroup's CPU quota in whole cores; `otherwise` where there is none."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return int(quota) // int(period) or 1
    except (OSError, ValueError):
        return otherwise
