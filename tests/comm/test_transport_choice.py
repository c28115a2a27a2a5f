"""Agreement of ranks on a transport, and release of its resources."""

from __future__ import annotations

import errno
import gc
import os
import platform
import threading
from pathlib import Path

import pytest
import torch

from weft.comm.collectives import all_reduce
from weft.comm.connect import transports
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan


def connect_with(obstacle: str) -> tuple[str, str, float]:
    """Connect two ranks with `obstacle` in effect. Return the transport, its reason and an all_reduce sum."""
    mesh = build_mesh(Plan(dp_replicate=2))
    with pytest.MonkeyPatch.context() as patch:
        if obstacle == "arm" and mesh.rank == 1:
            patch.setattr(platform, "machine", lambda: "aarch64")
        if obstacle == "windows":
            patch.delattr(os, "memfd_create")
        if obstacle == "other user" and mesh.rank == 1:
            patch.setattr(os, "getuid", lambda: 12345)
        if obstacle == "no memory":
            patch.setattr(os, "posix_fallocate", raise_os_error(errno.ENOMEM))
        if obstacle == "no access" and mesh.rank == 1:
            patch.setattr(os, "open", raise_os_error(errno.EACCES))
        if obstacle == "another file" and mesh.rank == 1:
            patch.setattr(os, "pread", lambda *args: b"something else..")
        value = float(all_reduce(torch.tensor(1.0 + mesh.rank), mesh.data))
    (choice,) = transports(mesh)
    assert (choice.ranks, choice.device) == ((0, 1), "cpu")
    return choice.transport, choice.reason, value


def raise_os_error(code: int):
    def call(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


SHARED_REASON = "all 2 ranks are on one host"
OBSTACLES = {
    "": (("shared memory", SHARED_REASON), ("shared memory", SHARED_REASON)),
    "arm": (
        ("gloo exchange", "its ranks are on 2 hosts, namespaces or users that share no memory"),
        ("gloo exchange", "this machine is aarch64, and shared memory relies on the order of x86-64's stores"),
    ),
    "windows": (("gloo exchange", "this system has no memfd_create (Linux only)"),) * 2,
    "other user": (("gloo exchange", "its ranks are on 2 hosts, namespaces or users that share no memory"),) * 2,
    "no memory": (
        ("gloo exchange", "8392704 bytes of shared memory cannot be allocated (Cannot allocate memory)"),
        ("gloo exchange", "another rank of the axis could not map the shared memory"),
    ),
    "no access": (
        ("gloo exchange", "another rank of the axis could not map the shared memory"),
        ("gloo exchange", "the memory of rank 0 cannot be opened (Permission denied)"),
    ),
    "another file": (
        ("gloo exchange", "another rank of the axis could not map the shared memory"),
        (
            "gloo exchange",
            "the memory of rank 0 cannot be opened (another file is at the address of the shared memory)",
        ),
    ),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_ranks_agree_on_one_transport_with_a_reason(ranks2, obstacle):
    found = ranks2.run(connect_with, obstacle)
    assert tuple(row[:2] for row in found) == OBSTACLES[obstacle]
    assert [row[2] for row in found] == [3.0, 3.0]


def num_links_of_equal_axes() -> int:
    mesh = build_mesh(Plan(dp_replicate=2))
    for axis in (mesh["dp_replicate"], mesh.data, mesh.world):
        all_reduce(torch.ones(3), axis)
    return len(transports(mesh))


def test_axes_with_equal_ranks_share_one_link(ranks2):
    assert ranks2.run(num_links_of_equal_axes) == [1, 1]


def resources_in_use() -> dict[str, int]:
    gc.collect()
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "python threads": threading.active_count(),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:weft"),
    }


def use_meshes(number: int) -> None:
    for _ in range(number):
        mesh = build_mesh(Plan.parse("dp_replicate=2 dp_shard=2"))
        for axis in (mesh["dp_replicate"], mesh["dp_shard"], mesh.world):
            all_reduce(torch.ones(5), axis)


def use_and_count(number: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """Return the mappings before the first mesh, and the resources in use after two meshes and after all.

    Mappings may exist before: a model under zero=3 that failed during backward stays alive, and so does its mesh.
    """
    start = resources_in_use()["mappings"]
    use_meshes(2)
    before = resources_in_use()
    use_meshes(number)
    return start, before, resources_in_use()


def test_hundred_meshes_leak_no_files_threads_or_mappings(ranks4):
    for start, before, after in ranks4.run(use_and_count, 100):
        assert after == before
        assert after["mappings"] == start
