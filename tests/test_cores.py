"""CPU affinity: ranks run on the cores of their GPU's NUMA node, on fake machines and with a real process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.cli.machines.doctor import cores as doctor_cores
from weft.comm.gpu_settings import Topology, choose_cores, format_cores, read_cores
from weft.env import RankEnv
from weft.train import joined_rank as near_gpu

GPUS = [f"0000:{bus:02x}:00.0" for bus in (0x3B, 0x5E, 0x86, 0xAF)]
ALL = frozenset(range(32))


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def machine(root: Path, nodes: dict[int, str], gpus: list[int], threads: int = 16, given: str = "") -> Topology:
    """Create a machine.

    Cores c and c + threads share a physical one. gpus: the NUMA node of each. given: the container's cores.
    """
    sys_, proc = root / "sys", root / "proc"
    for node, cores in nodes.items():
        write(sys_ / f"devices/system/node/node{node}/cpulist", cores)
    for pci, node in zip(GPUS, gpus, strict=False):
        write(sys_ / f"bus/pci/devices/{pci}/numa_node", node)
    every = sorted(set().union(*map(read_cores, nodes.values())))
    for core in every:
        siblings = f"{core % threads},{core % threads + threads}"
        write(sys_ / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list", siblings)
    write(sys_ / "devices/system/cpu/online", format_cores(frozenset(every)))
    write(proc / "self/cgroup", "0::/job/step")
    (sys_ / "fs/cgroup/job/step").mkdir(parents=True)
    if given:
        write(sys_ / "fs/cgroup/job/cpuset.cpus.effective", given)
    return Topology(sys_, proc)


TWO_NODES = {0: "0-7,16-23", 1: "8-15,24-31"}


def test_ranks_share_the_physical_cores_of_their_node(tmp_path):
    there = machine(tmp_path, TWO_NODES, [0, 0, 1, 0])
    chosen = [choose_cores(there, ALL, GPUS, rank) for rank in range(4)]
    assert [format_cores(choice.cores) for choice in chosen] == ["0-1,16-17", "2-4,18-20", "8-15,24-31", "5-7,21-23"]
    assert chosen[2].text == "bound to cores 8-15,24-31 of NUMA node 1, where GPU 0000:86:00.0 hangs"


def test_more_ranks_than_cores_share_all_cores(tmp_path):
    there = machine(tmp_path, {0: "0,16", 1: "1-15,17-31"}, [0, 0])
    assert {format_cores(choose_cores(there, ALL, GPUS[:2], rank).cores) for rank in range(2)} == {"0,16"}


@pytest.mark.parametrize(
    ("nodes", "gpus", "given", "allowed", "text"),
    [
        ({0: "0-31"}, [0], "", ALL, "not bound to cores: the machine has one NUMA node"),
        # taskset, or SLURM for each of its tasks: fewer than the machine or the control group has.
        (TWO_NODES, [0], "", ALL - {31}, "on cores 0-30 as they were set, not bound by Weft"),
        (TWO_NODES, [0], "0-11", frozenset({8}), "on cores 8 as they were set, not bound by Weft"),
        (TWO_NODES, [-1], "", ALL, f"not bound to cores: GPU {GPUS[0]}: the system does not report its NUMA node"),
        (TWO_NODES, [], "", ALL, f"not bound to cores: GPU {GPUS[0]}: the system does not report its NUMA node"),
        (TWO_NODES, [1], "0-7", frozenset(range(8)),
         f"not bound to cores: GPU {GPUS[0]}: no core of NUMA node 1 is allowed"),
    ],
)  # fmt: skip
def test_explicit_or_unknown_affinity_is_unchanged(nodes, gpus, given, allowed, text, tmp_path):
    choice = choose_cores(machine(tmp_path, nodes, gpus, given=given), allowed, GPUS[:1], 0)
    assert (choice.cores, choice.text) == (None, text)


def test_container_with_some_cores_is_bound_within_them(tmp_path):
    there = machine(tmp_path, TWO_NODES, [0, 1], given="4-11")
    allowed = frozenset(range(4, 12))
    assert [format_cores(choose_cores(there, allowed, GPUS[:2], rank).cores) for rank in range(2)] == ["4-7", "8-11"]


def test_control_group_of_one_rank_is_unchanged(tmp_path):
    """srun gives each task separate cores: no other rank of the machine shares them."""
    there = machine(tmp_path, TWO_NODES, [0, 1], given="4-7")
    choice = choose_cores(there, frozenset(range(4, 8)), GPUS[:2], 0, apart=True)
    assert (choice.cores, choice.text) == (None, "on cores 4-7 as they were set, not bound by Weft")
    assert (
        format_cores(choose_cores(machine(tmp_path / "all", TWO_NODES, [0, 1]), ALL, GPUS[:2], 0, apart=True).cores)
        == "0-7,16-23"
    )


def test_control_groups_v1_are_read_too(tmp_path):
    there = machine(tmp_path, TWO_NODES, [0])
    write(there.proc / "self/cgroup", "5:cpu,cpuacct:/other\n4:cpuset:/job/step")
    write(there.sys / "fs/cgroup/cpuset/job/cpuset.effective_cpus", "0-3")
    assert there.allowed_cores() == frozenset(range(4))


BOUND = """
import os, threading
from weft.comm.gpu_settings import bind, cores_of_rank
both = os.sched_getaffinity(0)
own, placed = threading.Event(), threading.Event()
seen = {}
def work(name, cores):
    if cores:
        os.sched_setaffinity(0, cores)
    placed.set()
    own.wait()
    seen[name] = os.sched_getaffinity(0)
core, other = sorted(both)[:2]
first = threading.Thread(target=work, args=("follows", None))
first.start(); placed.wait(); placed.clear()
second = threading.Thread(target=work, args=("placed", {other}))
second.start(); placed.wait()
before = cores_of_rank(2)
bind(frozenset({core}))
own.set(); first.join(); second.join()
assert os.sched_getaffinity(0) == seen["follows"] == {core}, seen
assert seen["placed"] == {other}, seen
assert (before, cores_of_rank(2)) == (len(both) // 2, 1), before
"""


@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores of Linux")
def test_all_threads_are_bound_except_placed_ones():
    """In a separate process, whose affinity really changes."""
    subprocess.run([sys.executable, "-c", BOUND], check=True, timeout=60)


def placed_rank(monkeypatch, tmp_path, numa: bool) -> list[frozenset[int]]:
    """Return the cores that a rank on a GPU binds itself to: local rank 1 of 2."""
    bound: list[frozenset[int]] = []
    properties = [SimpleNamespace(pci_domain_id=0, pci_bus_id=int(gpu[5:7], 16), pci_device_id=0) for gpu in GPUS]
    monkeypatch.setattr(near_gpu, "pick_device", lambda kind, local_rank: torch.device("cuda", local_rank))
    monkeypatch.setattr(near_gpu, "Topology", lambda: machine(tmp_path, TWO_NODES, [0, 0]))
    monkeypatch.setattr(near_gpu, "bind", bound.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(ALL))
    place = RankEnv(1, 2, 1, 2, "127.0.0.1", 29500, "weft")
    assert near_gpu.device_of_rank("auto", numa, place) == torch.device("cuda", 1)
    return bound


@pytest.mark.parametrize("numa", [True, False])
def test_rank_on_a_gpu_is_bound_unless_disabled(numa, monkeypatch, tmp_path, capfd):
    assert placed_rank(monkeypatch, tmp_path, numa) == [frozenset({*range(4, 8), *range(20, 24)})] * numa
    message = "rank 1: bound to cores 4-7,20-23 of NUMA node 0, where GPU 0000:5e:00.0 hangs\n"
    assert capfd.readouterr().err == (message if numa else "")


def test_rank_on_a_cpu_is_not_bound(monkeypatch):
    monkeypatch.setattr(near_gpu, "stay_near_gpu", lambda place: pytest.fail("bound"))
    assert near_gpu.device_of_rank("cpu", True, None) == torch.device("cpu")


def test_doctor_reports_the_binding(monkeypatch, tmp_path):
    import weft.comm.gpu_settings

    there = machine(tmp_path, TWO_NODES, [0, 1])
    monkeypatch.setattr(weft.comm.gpu_settings, "Topology", lambda: there)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(ALL))
    assert [(line.name, line.text) for line in doctor_cores(GPUS[:2])] == [
        ("cores of gpu 0", "a rank is bound to cores 0-7,16-23 of NUMA node 0, where GPU 0000:3b:00.0 hangs"),
        ("cores of gpu 1", "a rank is bound to cores 8-15,24-31 of NUMA node 1, where GPU 0000:5e:00.0 hangs"),
    ]
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert [(line.name, line.text) for line in doctor_cores(GPUS[:2])] == [
        ("cores", "a rank is on cores 0-1 as they were set, not bound by Weft")
    ]
