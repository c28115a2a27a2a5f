"""Constants of the cost model for GPUs from a profile: what was measured takes the place of what tables say.

Each constant is solved for in the formula that uses it (kernels.py and collective_cost.py in planner/cost/), from the
samples that it decides most. Constants that no sample decides stay as the tables have them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from weft.planner.cost.machine import Tables, flash_s
from weft.planner.measured.laws import fit_law
from weft.planner.measured.profile import Measurement, Profile
from weft.spec import DeviceSpec

#: Bytes that a fused AdamW step moves for a parameter in fp32: four numbers read, three written.
_ADAM_BYTES = 28.0


def constants_of(profile: Profile, device: DeviceSpec, tables: Tables) -> dict[str, float]:
    """Constants of `tables` that the profile decides. device: the one that was measured."""
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
        found["host_op_s"] = min(each.seconds for each in calls)  # so small that the host's call is all of it
    return found | _host(profile) | _links(profile, device)


def _host(profile: Profile) -> dict[str, float]:
    """Rate between a device and the host, and of the host's optimizer, with all devices at work: they share both."""
    found: dict[str, float] = {}
    moved = _crowded(profile, "to_host", "to_device")
    if moved:
        most = max(each.size for each in moved)
        found["host_rate"] = most[0] / max(each.seconds for each in moved if each.size == most)
    if steps := _crowded(profile, "host_adamw"):
        slowest = max(steps, key=lambda each: each.seconds / each.size[0])
        found["host_step_rate"] = slowest.ranks * _ADAM_BYTES * slowest.size[0] / slowest.seconds
    return found


def _crowded(profile: Profile, *ops: str) -> list[Measurement]:
    """Samples of these operations with most ranks at work."""
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
    """Rate and start of collectives over all devices of the node."""
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
