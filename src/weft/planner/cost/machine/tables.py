"""Constants of the cost model for one device, and where each comes from."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, Problem, did_you_mean
from weft.spec import DeviceSpec

#: "datasheet": the vendor's rates and constants common to all devices. "tables": measured ones where there are any.
TIERS = ("datasheet", "tables")
_DEFAULT_SMS = 128
#: Entries of a device that are facts of its make, which every tier reads.
_HARDWARE = ("sms", "flash2_gain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What programs reach of a device's rates. Rates are FLOP/s and bytes/s of one device and direction, times s.

    The names are those of `tables.toml`. flops: dense peak by precision. rungs: constant -> "here" (measured on this
    machine), "table" (shipped measurement or fit of this device) or "common" (for every device).
    learned: factor of terms, from runs.
    """

    flops: Mapping[str, float]
    memory_rate: float
    link_rate: float
    link_domain: int
    link_mesh: bool
    nic_rate: float
    host_rate: float
    memory_bytes: float
    sms: int
    flash2_gain: float
    gemm_ceiling: float
    gemm_sustained: float
    gemm_k0: float
    grouped_k0: float
    tile_power: float
    fp8_gain: float
    fp8_row_share: float
    attn_fwd: float
    attn_bwd: float
    attn_s0: float
    core_eff: float
    memory_eff: float
    adam_eff: float
    launch_s: float
    host_op_s: float
    link_eff: float
    link_alpha_s: float
    nic_eff: float
    nic_alpha_s: float
    half_bytes: float
    overlap_compute: float
    overlap_comm: float
    straggler: float
    step_s: float
    host_step_rate: float
    barrier_s: float
    context_gib: float
    communicator_gib: float
    reserve: float
    usable: float
    rungs: Mapping[str, str]
    learned: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(cls, device: DeviceSpec, tier: str = "tables", profile: Mapping[str, float] | None = None) -> Tables:
        """Return the constants of a device.

        Args:
            device: known or described.
            tier: one of TIERS.
            profile: constants measured on this machine, by name; they win.

        Raises:
            ConfigError: for an unknown tier or an unknown constant in the profile.
        """
        if tier not in TIERS:
            raise _error("tier", f"tier={tier}: not one of {', '.join(TIERS)}.{did_you_mean(tier, TIERS)}")
        shipped = _shipped()
        values: dict[str, Any] = dict(shipped["common"])
        rungs = dict.fromkeys(values, "common")
        own = _own_constants(device, shipped["devices"]) if tier == "tables" else {}
        values |= own
        rungs |= dict.fromkeys(own, "table")
        known = {each.name for each in fields(cls)} - {"rungs", "flops", "learned"}
        for name, value in (profile or {}).items():
            if name not in known:
                raise _error(name, f"profile.{name}: no such constant.{did_you_mean(name, known)}")
            values[name] = value
            rungs[name] = "here"
        return cls(**(_rates(device, shipped["devices"]) | values), rungs=rungs)

    def changed(self, **values: float) -> Tables:
        """Return a copy with some constants replaced."""
        return replace(self, **values)  # pyright: ignore[reportArgumentType]  # fields of numbers


@functools.cache
def _shipped() -> dict[str, Any]:
    text = Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _base_name(device: DeviceSpec) -> str:
    return device.name.rstrip("*")  # a known device with changed numbers


def _own_constants(device: DeviceSpec, tables: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    own = {name: value for name, value in tables.get(_base_name(device), {}).items() if name not in _HARDWARE}
    peak = device.peak_flops("bf16") or device.peak_flops("fp16")
    if device.measured_flops is not None and peak:
        own.setdefault("gemm_ceiling", device.measured_flops / peak)
    return own


def _rates(device: DeviceSpec, tables: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    own = tables.get(_base_name(device), {})
    flops = dict(device.peaks)
    half = flops.get("bf16") or flops.get("fp16") or flops.get("fp32") or 1e12
    flops = {"bf16": half, "fp16": half, "fp8": half, "fp32": flops.get("tf32", half / 2) / 8} | flops
    flops.setdefault("fp64", flops["fp32"] / 2)
    flops.setdefault("fp4", flops["fp8"])
    flops.setdefault("tf32", flops["fp32"])
    return {
        "flops": flops,
        "memory_rate": device.memory_bytes_per_s or 1e11,
        "link_rate": device.scale_up_bytes_per_s or 1e10,
        "link_domain": device.scale_up_domain,
        "link_mesh": device.scale_up_topology == "mesh",
        "nic_rate": device.nic_bytes_per_s or 12.5e9,
        "host_rate": device.host_bytes_per_s or 12e9,
        "memory_bytes": float(device.memory_bytes),
        "sms": own.get("sms", _DEFAULT_SMS),
        "flash2_gain": own.get("flash2_gain", 1.0),
    }


def _error(field: str, message: str) -> ConfigError:
    return ConfigError([Problem(field, message)])
