"""Memory of the host (no torch)."""

from __future__ import annotations

from pathlib import Path

import psutil

from weft import env

#: File with the memory limit of this process's container.
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def free_host_bytes() -> int:
    """Return the memory in bytes that is available on this machine, or in its container if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = int(_CGROUP_LIMIT.read_text())
        stat = dict(line.split() for line in _CGROUP_LIMIT.with_name("memory.stat").read_text().splitlines())
        used = int(_CGROUP_LIMIT.with_name("memory.current").read_text()) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):  # no limit
        return free
    return max(0, min(free, limit - used))


def free_bytes_of_a_rank() -> int:
    """Return the memory in bytes that is available on this machine for each of its ranks."""
    place = env.rank_env()
    return free_host_bytes() // (1 if place is None else place.local_world_size)
