"""Constants of the cost model from a profile: measured values replace the tables' values.

For GPUs, each constant is solved from the formula that uses it (`planner/cost/machine.py`), with the measurements that
it affects most. Constants without such measurements keep the tables' values.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from weft.config.cluster import ClusterSpec, DeviceSpec, device_by_torch_name
from weft.errors import ConfigError, Problem
from weft.planner.cost.machine import Tables, flash_s
from weft.planner.measured.laws import Laws, factors, fit_law
from weft.planner.measured.machine_profile import Machine, Measurement, Profile, default_path, load_profile

#: Bytes that a fused AdamW step moves per fp32 parameter: four values read, three written.
_ADAM_BYTES = 28.0


def constants_of(profile: Profile, device: DeviceSpec, tables: Tables) -> dict[str, float]:
    """Return the constants of `tables` that the profile determines, for the measured device.

    Args:
        device: the measured device.
        tables: constants without the profile.
    """
    found: dict[str, float] = {}
    peak = device.peak_flops("bf16") or device.peak_flops("fp16")
    products = [*_of(profile, "linear_f", "bf16")]
    if products and peak:
        best = max(2.0 * s.size[0] * s.size[1] * s.size[2] / s.seconds for s in products)
        found["gemm_ceiling"] = best / peak
        found |= _attention(profile, tables.changed(gemm_ceiling=best / peak), peak)
    copies = [*_of(profile, "copy", "bf16")] or [*_of(profile, "copy", "fp32")]
    if copies and device.memory_bytes_per_s:
        most = max(copies, key=lambda each: each.size)
        width = 2 if most.dtype == "bf16" else 4
        found["memory_eff"] = 2.0 * width * most.size[0] * most.size[1] / most.seconds / device.memory_bytes_per_s
    steps = [*_of(profile, "adamw", "fp32")]
    if steps and device.memory_bytes_per_s:
        most = max(steps, key=lambda each: each.size)
        found["adam_eff"] = _ADAM_BYTES * most.size[0] / most.seconds / device.memory_bytes_per_s
    if calls := [*_of(profile, "add", "fp32")]:
        found["host_op_s"] = min(each.seconds for each in calls)  # small enough that the host's call takes all of it
    return found | _host(profile) | _links(profile, device)


def _host(profile: Profile) -> dict[str, float]:
    """Return the transfer rates between device and host, and the rate of the host's optimizer.

    They are measured with all devices active, since devices share them.
    """
    found: dict[str, float] = {}
    moved = _most_contended(profile, "to_host", "to_device")
    if moved:
        most = max(each.size for each in moved)
        found["host_rate"] = most[0] / max(each.seconds for each in moved if each.size == most)
    if steps := _most_contended(profile, "host_adamw"):
        slowest = max(steps, key=lambda each: each.seconds / each.size[0])
        found["host_step_rate"] = slowest.ranks * _ADAM_BYTES * slowest.size[0] / slowest.seconds
    return found


def _most_contended(profile: Profile, *ops: str) -> list[Measurement]:
    """Return the measurements of these operations with the most active ranks."""
    found = [sample for sample in profile.samples if sample.op in ops]
    most = max((sample.ranks for sample in found), default=0)
    return [sample for sample in found if sample.ranks == most]


def _of(profile: Profile, op: str, dtype: str) -> Iterable[Measurement]:
    return (s for s in profile.samples if s.op == op and s.dtype == dtype and s.ranks == 1)


def _attention(profile: Profile, tables: Tables, peak: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for op, name, times in (("attention_f", "attn_fwd", 4.0), ("attention_b", "attn_bwd", 10.0)):
        shares: list[float] = []
        for sample in _of(profile, op, "bf16"):
            b, h, s, c = sample.size
            flops = times * b * h * s * c * (s + 128) / 2  # causal, in blocks of 128
            unit = tables.changed(**{name: 1.0})
            ideal = float(flash_s(unit, flops, s, c, op == "attention_b", peak))
            shares.append(ideal / sample.seconds)
        if shares:
            found[name] = statistics.median(shares)
    return found


def _links(profile: Profile, device: DeviceSpec) -> dict[str, float]:
    """Return rate and latency of collectives over all devices of the node."""
    groups = [sample.group for sample in profile.samples if sample.op == "all_gather"]
    if not groups or not device.scale_up_bytes_per_s:
        return {}
    most = max(groups)
    law = fit_law("all_gather", [s for s in profile.samples if s.op == "all_gather" and s.group == most])
    start, _, each = law.coefficients
    if each <= 0:
        return {}
    rate = (most - 1) / most / each
    return {"link_eff": rate / device.scale_up_bytes_per_s, "link_alpha_s": max(start, 1e-6)}


# Description of this host as in a profile, without torch, to check if a profile is still valid.

#: "here", "local", "4xhere": this machine, with an optional number of ranks.
_HERE = re.compile(r"(?:([0-9]{1,4})x)?(?:here|local)")


def this_host() -> Machine:
    """Return the description of this machine for CPU ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    import psutil

    return Machine(
        kind="cpu",
        device=_processor(),
        count=1,
        cores=cores,
        threads=1,
        memory_bytes=psutil.virtual_memory().total,
        torch=_torch_version(),
        transports=("shared memory",) if _shares_memory() else ("gloo exchange",),
    )


def is_this_machine(text: str) -> bool:
    """Return True if the text of a cluster means this machine."""
    return _HERE.fullmatch(text.strip().lower()) is not None


def local_profile(path: Path | None = None) -> Profile:
    """Read this machine's profile.

    Raises:
        ConfigError: if there is no profile, or it was made for another machine or software.
    """
    path = path or default_path()
    if not path.exists():
        rule = f"this machine has not been measured: there is no {path}"
        raise ConfigError([Problem("cluster", f"cluster=here: {rule}. Measure it first: weft calibrate")])
    profile = load_profile(path)
    changes = stale(profile)
    if changes:
        rule = f"it was measured with {'; '.join(changes)}"
        raise ConfigError([Problem("profile", f"profile={path}: {rule}. Measure again: weft calibrate")])
    return profile


def stale(profile: Profile) -> list[str]:
    """Return the differences between this machine and the profile.

    For GPUs, only properties that are available without torch are compared.
    """
    host = this_host()
    if profile.machine.kind == "cpu":
        return profile.machine.differences(host)
    seen = replace(profile.machine, cores=host.cores, torch=host.torch)
    return profile.machine.differences(seen)


def cluster_of(profile: Profile, text: str = "here") -> ClusterSpec:
    """Return a profile's machine as a cluster of one node.

    Args:
        text: "here", or "4xhere" for a number of ranks.

    Raises:
        ConfigError: for a number of ranks that the machine does not support.
    """
    match = _HERE.fullmatch(text.strip().lower())
    machine = profile.machine
    wanted = int(match[1]) if match and match[1] else machine.count if machine.kind == "cuda" else machine.cores
    if machine.kind == "cuda":
        if not 1 <= wanted <= machine.count:
            rule = f"this machine has {machine.count} GPUs"
            raise ConfigError([Problem("cluster", f"cluster={text}: {rule}. Use e.g. {machine.count}xhere.")])
        return ClusterSpec(nodes=1, devices_per_node=wanted, device=_gpu(machine))
    most = 8 * machine.cores
    if not 1 <= wanted <= most:
        rule = f"this machine has {machine.cores} cores, and Weft estimates at most {most} ranks on them"
        raise ConfigError([Problem("cluster", f"cluster={text}: {rule}. Use e.g. {machine.cores}xhere.")])
    return ClusterSpec(nodes=1, devices_per_node=wanted, device=_cpu(profile, wanted))


def _cpu(profile: Profile, num_ranks: int) -> DeviceSpec:
    """Return one rank's share of a CPU. Peak rates are from the fastest measured matmuls, divided by the ranks."""
    machine = profile.machine
    peaks: dict[str, float] = {}
    formats = profile.formats(num_ranks)
    for sample in profile.samples:
        if sample.op == "linear_f" and sample.dtype in formats:
            m, n, k = sample.size
            crowd = sample.ranks * 2.0 * m * n * k / sample.seconds  # of all active ranks together
            peaks[sample.dtype] = max(peaks.get(sample.dtype, 0.0), crowd)
    copies = [s.ranks * 8.0 * s.size[0] * s.size[1] / s.seconds for s in profile.samples if s.op == "copy"]
    moved = [s.ranks * s.size[0] / s.seconds for s in profile.samples if s.op in ("to_host", "to_device")]
    return DeviceSpec(
        name="here",
        title=machine.device,
        peaks=tuple((name, peak / num_ranks) for name, peak in sorted(peaks.items())),
        memory_bytes=machine.memory_bytes // num_ranks,
        memory_bytes_per_s=max(copies, default=1e10) / num_ranks,
        scale_up_bytes_per_s=max(copies, default=1e10) / num_ranks / 2,
        scale_up_domain=num_ranks,
        host_bytes_per_s=max(moved, default=1e10) / num_ranks,
        sources="measured",
        note="ranks share the cores of one host",
    )


def _gpu(machine: Machine) -> DeviceSpec:
    known = device_by_torch_name(machine.device)
    if known is None:
        rule = f"the device {machine.device!r} of the profile is not in the device table"
        remedy = "Describe it in a cluster file, and give the profile by --profile"
        raise ConfigError([Problem("cluster", f"cluster=here: {rule}. {remedy}.")])
    return replace(known, memory_bytes=machine.memory_bytes)


def _torch_version() -> str:
    from importlib import metadata  # slow to load, and most plans are for other machines

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def _shares_memory() -> bool:
    """Return True if ranks of this host can use the shared-memory transport."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _processor() -> str:
    """Return the processor's name from Linux, or from `platform`."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        told.setdefault(key.strip(), value.strip())
    name = told.get("model name") or platform.processor() or platform.machine()
    detail = "-".join(told[key] for key in ("cpu family", "model", "stepping") if told.get(key))
    return f"{name} ({detail})" if detail else name


# Constants of a host: a device's constants and the cost models of its operations.


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTables(Tables):
    """Constants of a CPU host whose ranks share its cores.

    Attributes:
        laws: fitted cost models of its operations, from which estimates are computed.
    """

    laws: Laws

    @classmethod
    def with_laws(cls, tables: Tables, laws: Laws) -> HostTables:
        """Return a host's constants together with its fitted cost models."""
        return cls(**{each.name: getattr(tables, each.name) for each in fields(tables)}, laws=laws)


# Constants of a measured machine for the planner.

#: Constants of communication terms. They count as measured only if as many ranks were active.
_TRAFFIC = ("link_eff", "nic_eff", "overlap_compute")


def measured_tables(profile: Profile, cluster: ClusterSpec, tier: str) -> Tables:
    """Return the cost model's constants for a measured machine. For a host they include the fitted cost models.

    Args:
        cluster: the cluster to plan for.
        tier: source of unmeasured constants.

    Raises:
        ConfigError: for several hosts, and for a host's profile without compute measurements.
    """
    tables = Tables.of(cluster.device, tier)
    if profile.machine.kind == "cuda":
        constants = constants_of(profile, cluster.device, tables)
        return replace(Tables.of(cluster.device, tier, constants), learned=factors(profile))
    if cluster.nodes > 1:
        rule = f"the profile has measurements of one host only, not of the network between {cluster.nodes} hosts"
        raise ConfigError([Problem("cluster", f"nodes={cluster.nodes}: {rule}. Use one node.")])
    laws = Laws.of(profile)
    rungs = dict.fromkeys(tables.rungs, "here") | {"straggler": "common"}
    if cluster.num_devices > max(laws.counts):
        rungs |= dict.fromkeys(_TRAFFIC, "common")  # extrapolated from the largest measured number of ranks
    return HostTables.with_laws(replace(tables, rungs=rungs, learned=factors(profile), usable=0.9), laws)
