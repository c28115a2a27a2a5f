"""Constants of the cost model from a profile: measured values replace the tables' values.

Each constant is solved from the formula that uses it (`planner/cost/`), with the measurements that it affects most.
Constants without such measurements keep the tables' values. The ranks of a CPU host share its cores: its constants are
those of the smallest measured number of concurrent ranks that is not below the plan's, or else of the largest.
"""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from weft.config.cluster import ClusterSpec, DeviceSpec, device_by_torch_name
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import ConfigError, Problem
from weft.planner.cost.layer import EAGER_BYTES, layer_costs
from weft.planner.cost.machine import RING_PASSES, Fabric, Tables, flash_s
from weft.planner.cost.step import ADAM_BYTES
from weft.planner.measured.corrections import factors
from weft.planner.measured.links import fit_transfer
from weft.planner.measured.machine_profile import Machine, Measurement, Profile, default_path, load_profile
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape

#: Size of the layer that is timed as a unit: tokens, width, feed-forward width, heads. See calibrate/compute.py.
TINY = (16, 64, 128, 4)
#: Bytes that a fused AdamW step moves per fp32 parameter in host memory: four values read, three written.
_HOST_ADAM_BYTES = 28.0


def measured_tables(profile: Profile, cluster: ClusterSpec, tier: str) -> Tables:
    """Return the cost model's constants for a measured machine.

    Raises:
        ConfigError: for several CPU hosts, and for a profile of a CPU host without matmuls.
    """
    if profile.machine.kind == "cpu" and cluster.nodes > 1:
        rule = f"the profile has measurements of one host only, not of the network between {cluster.nodes} hosts"
        raise ConfigError([Problem("cluster", f"nodes={cluster.nodes}: {rule}. Use one node.")])
    tables = Tables.of(cluster.device, tier)
    constants = constants_of(profile, cluster.device, tables, cluster.num_devices)
    return replace(Tables.of(cluster.device, tier, constants), learned=factors(profile))


def constants_of(profile: Profile, device: DeviceSpec, tables: Tables, num_ranks: int) -> dict[str, float]:
    """Return the constants of `tables` that the profile determines, for the measured device.

    Args:
        num_ranks: concurrent ranks, which share the cores of a CPU host.

    Raises:
        ConfigError: for a profile of a CPU host without matmuls.
    """
    on_host = profile.machine.kind == "cpu"
    dtype, ranks, crowd = "bf16", 1, 1.0
    if on_host:  # the measured number of ranks that is just enough, or the largest
        dtype, ranks = "fp32", profile.ranks_near(num_ranks)
        crowd = max(1.0, num_ranks / ranks)

    def of(*ops: str, dtype: str = "fp32") -> list[Measurement]:
        return [one for one in profile.samples
                if one.op in ops and one.dtype == dtype and one.ranks == ranks and one.group == 1]  # fmt: skip

    found: dict[str, float] = {}
    peak = device.peak_flops(dtype) or device.peak_flops("fp16")
    products, memory = of("linear_f", dtype=dtype), device.memory_bytes_per_s
    best = 0.0
    if products and peak:
        best = max(_flops(each) for each in products) / crowd
        found["gemm_ceiling"] = best / peak
        attention = of("attention_f", "attention_b", dtype=dtype)
        found |= _attention(attention, tables.changed(gemm_ceiling=best * crowd / peak), peak)
    elif on_host:
        rule = "it has no measured matrix products"
        raise ConfigError([Problem("profile", f"profile={profile.path}: {rule}. Create it again: weft calibrate")])
    copies = of("copy", dtype=dtype) or of("copy")
    if copies and memory and not on_host:
        most = max(copies, key=lambda each: each.size)
        width = 2 if most.dtype == "bf16" else 4
        found["memory_eff"] = 2.0 * width * most.size[0] * most.size[1] / most.seconds / memory
    if (steps := of("adamw")) and memory:
        most = max(steps, key=lambda each: each.size)
        found["adam_eff"] = ADAM_BYTES * most.size[0] / most.seconds / memory / crowd
    calls = of("add")
    if calls and not on_host:
        found["host_op_s"] = min(each.seconds for each in calls)  # small enough that the host's call takes all of it
    if on_host:
        rates = [_flops(one) for one in of("linear_f", "linear_dx", "linear_dw")]
        found["gemm_sustained"] = statistics.geometric_mean(rates) / (best * crowd)
        # Element-wise kernels move values of 4 bytes, and compute as well: a lower rate than a copy's.
        if (passes := of(*EAGER_BYTES)) and memory:
            moved = sum(2 * EAGER_BYTES[one.op] * math.prod(one.size) for one in passes)
            found["memory_eff"] = moved / sum(one.seconds for one in passes) / memory / crowd
        if tiny := of("block_f", "block_b"):
            found["launch_s"] = sum(one.seconds for one in tiny) / _launches(tables) * crowd
    return found | _host(profile) | _links(profile, device, num_ranks)


def _flops(one: Measurement) -> float:
    return 2.0 * math.prod(one.size) / one.seconds


def _launches(tables: Tables) -> float:
    """Return the number of kernel launches in forward and backward of the layer TINY, as the cost model counts them."""
    tokens, width, ffn, heads = TINY
    spec = DecoderSpec(vocab_size=8, dim=width, num_layers=1, num_heads=heads, num_kv_heads=heads, ffn_dim=ffn,
                       max_seq_len=tokens)  # fmt: skip
    job = Job(shape=Shape.of_decoder(spec), seq_len=tokens, global_batch=1)
    free = replace(tables, flops=dict.fromkeys(tables.flops, math.inf), memory_rate=math.inf, launch_s=1.0)
    costs = layer_costs(job, Columns.of([Plan(precision="fp32")], job), free, Fabric.of(free, 1))
    return float(sum(getattr(costs, f"{part}_{side}")[0] for part in ("gemm", "attn", "memory") for side in "fb"))


def _host(profile: Profile) -> dict[str, float]:
    """Return the transfer rates between device and host, and the rate of the host's optimizer.

    They are measured with all devices active, since devices share them.
    """

    def contended(*ops: str) -> list[Measurement]:
        samples = [sample for sample in profile.samples if sample.op in ops]
        most = max((sample.ranks for sample in samples), default=0)
        return [sample for sample in samples if sample.ranks == most]

    found: dict[str, float] = {}
    if moved := contended("to_host", "to_device"):
        most = max(each.size for each in moved)
        found["host_rate"] = most[0] / max(each.seconds for each in moved if each.size == most)
    if steps := contended("host_adamw"):
        slowest = max(steps, key=lambda each: each.seconds / each.size[0])
        found["host_step_rate"] = slowest.ranks * _HOST_ADAM_BYTES * slowest.size[0] / slowest.seconds
    return found


def _attention(samples: Iterable[Measurement], tables: Tables, peak: float) -> dict[str, float]:
    shares: dict[str, list[float]] = {}
    for one in samples:
        is_back = one.op == "attention_b"
        name = "attn_bwd" if is_back else "attn_fwd"
        b, h, s, c = one.size
        flops = (10.0 if is_back else 4.0) * b * h * s * c * (s + 128) / 2  # causal, in blocks of 128
        ideal = float(flash_s(tables.changed(**{name: 1.0}), flops, s, is_back, peak))
        shares.setdefault(name, []).append(ideal / one.seconds)
    return {name: statistics.median(each) for name, each in shares.items()}


def _links(profile: Profile, device: DeviceSpec, num_ranks: int) -> dict[str, float]:
    collectives = [one for one in profile.samples if one.op in RING_PASSES and one.group > 1 and one.group == one.ranks]
    groups = {one.group for one in collectives}
    if not groups or not device.scale_up_bytes_per_s:
        return {}
    group = min(groups, key=lambda size: (abs(math.log2(size / max(2, num_ranks))), -size))
    rates, starts, ramps = list[float](), list[float](), list[float]()
    for op, passes in RING_PASSES.items():
        own = [one for one in collectives if one.op == op and one.group == group]
        start, ramp, each = (
            fit_transfer([one.size[0] for one in own], [one.seconds for one in own]) if own else (0, 0, 0)
        )
        if each > 0:
            rates.append(passes * (group - 1) / group / each)
            starts.append(max(start, 1e-6))
            ramps.append((ramp / each) ** 2)
    if not rates:
        return {}
    crowd = max(1.0, num_ranks / group) if device.is_cpu else 1.0
    rate = statistics.geometric_mean(rates) / crowd
    found = {"link_eff": rate / device.scale_up_bytes_per_s, "link_alpha_s": statistics.mean(starts) * crowd}
    if device.is_cpu:  # on GPUs the network between nodes shares this constant
        found["half_bytes"] = statistics.mean(ramps)
    return found


# Description of this host as in a profile, without torch, to check if a profile is still valid.

#: "here", "local", "4xhere": this machine, with an optional number of ranks.
_HERE = re.compile(r"(?:([0-9]{1,4})x)?(?:here|local)")


def this_host() -> Machine:
    """Return the description of this machine for CPU ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    is_shared = platform.system() == "Linux" and platform.machine() == "x86_64"
    import psutil

    return Machine(
        kind="cpu",
        device=_processor(),
        count=1,
        cores=cores,
        threads=1,
        memory_bytes=psutil.virtual_memory().total,
        torch=_torch_version(),
        transports=("shared memory",) if is_shared else ("gloo exchange",),
    )


def is_this_machine(text: str) -> bool:
    """Return True if the text of a cluster means this machine."""
    return _HERE.fullmatch(text.strip().lower()) is not None


def local_profile(path: Path | None = None) -> Profile:
    """Read this machine's profile.

    Raises:
        ConfigError: if there is no profile, or it is invalid or was made for another machine or software.
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
    """Return the differences between this machine and the profile as text lines; [] if the profile is valid here.

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
        ConfigError: for a number of ranks that the machine does not support, or a GPU that is not in the device table.
    """
    match = _HERE.fullmatch(text.strip().lower())
    machine = profile.machine
    wanted = int(match[1]) if match and match[1] else machine.cores if machine.kind == "cpu" else machine.count
    if machine.kind != "cpu":
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


def _processor() -> str:
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
