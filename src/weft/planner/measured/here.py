"""This host as a profile names it, without torch: to see whether a profile still speaks of it."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import replace
from pathlib import Path

from weft.errors import ConfigError, Problem
from weft.planner.measured.profile import Machine, Profile, default_path, load_profile
from weft.spec import ClusterSpec, DeviceSpec
from weft.spec.cluster import device_by_torch_name

#: "here", "local", "4xhere": this machine, with so many ranks.
_HERE = re.compile(r"(?:([0-9]{1,4})x)?(?:here|local)")


def this_host() -> Machine:
    """What ranks on this machine's processor are."""
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


def asks_for_here(text: str) -> bool:
    """Whether a cluster's text means this machine."""
    return _HERE.fullmatch(text.strip().lower()) is not None


def profile_here(path: Path | None = None) -> Profile:
    """This machine's profile. Raises ConfigError where there is none, or where it is of another machine or software."""
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
    """What of this machine is not as the profile has it; of GPUs, what can be seen without torch."""
    host = this_host()
    if profile.machine.kind == "cpu":
        return profile.machine.differences(host)
    seen = replace(profile.machine, cores=host.cores, torch=host.torch)
    return profile.machine.differences(seen)


def cluster_of(profile: Profile, text: str = "here") -> ClusterSpec:
    """The machine of a profile as a cluster of one node. text: "here", or "4xhere" for so many ranks."""
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
    """One rank's share of a processor. Peaks are the fastest products that were measured, shared by the ranks."""
    machine = profile.machine
    peaks: dict[str, float] = {}
    formats = profile.formats(num_ranks)
    for sample in profile.samples:
        if sample.op == "linear_f" and sample.dtype in formats:
            m, n, k = sample.size
            crowd = sample.ranks * 2.0 * m * n * k / sample.seconds  # of all ranks that were at work
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
    """Whether ranks of this host pass pieces through shared memory: the transport's own condition."""
    return platform.system() == "Linux" and platform.machine() == "x86_64"


def _processor() -> str:
    """The processor's name, as Linux tells it, else the platform's word for it."""
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
