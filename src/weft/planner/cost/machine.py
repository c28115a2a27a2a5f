"""Constants of the cost model for one device, and the times of single kernels and collectives."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.config.cluster import DeviceSpec
from weft.errors import ConfigError, Problem, did_you_mean

#: "datasheet": the vendor's rates and constants common to all devices. "tables": measured constants, if available.
TIERS = ("datasheet", "tables")
_DEFAULT_SMS = 128
#: Device generations by prefixes of device names. The first match wins.
_GENERATIONS = (
    ("volta", ("v100",)),
    ("ampere", ("a100", "a800")),
    ("hopper", ("h100", "h200", "h800", "h20", "gh200")),
    ("blackwell", ("b200", "b300", "gb200", "gb300")),
    ("cdna", ("mi300x", "mi325x", "mi350x", "mi355x")),
    ("tpu", ("tpu-v5p", "tpu-v6e")),
)
#: Device constants that are facts of its hardware. Both tiers read them.
_HARDWARE = ("sms", "flash2_gain", "grouped_gain", "fp8_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Rates that programs achieve on a device, and other constants of the cost model.

    Rates are FLOP/s and bytes/s of one device and one direction. Names that end in `_s` are times in seconds. Names are
    as in `tables.toml`.

    Attributes:
        flops: dense peak by precision.
        rungs: source of each constant: "here" (measured on this machine), "table" (published measurement or fit for
            this device) or "common" (for every device).
        learned: correction factors of terms, from runs.
        slowdown: factor on all terms for the device's generation, from published runs.
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
    grouped_gain: float
    gemm_ceiling: float
    gemm_sustained: float
    gemm_k0: float
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
    slowdown: float = 1.0

    @classmethod
    def of(cls, device: DeviceSpec, tier: str = "tables", profile: Mapping[str, float] | None = None) -> Tables:
        """Return the constants of a device.

        Args:
            tier: one of TIERS.
            profile: constants measured on this machine, by name; they take precedence.

        Raises:
            ConfigError: for an unknown tier or an unknown constant in the profile.
        """
        if tier not in TIERS:
            raise _error("tier", f"tier={tier}: not one of {', '.join(TIERS)}.{did_you_mean(tier, TIERS)}")
        shipped = _shipped()
        values: dict[str, Any] = dict(shipped["common"])
        rungs = dict.fromkeys(values, "common")
        own: dict[str, float] = {}
        if tier == "tables":
            listed: dict[str, float] = shipped["devices"].get(_base_name(device), {})
            own = {name: value for name, value in listed.items() if name not in _HARDWARE}
            peak = device.peak_flops("bf16") or device.peak_flops("fp16")
            if device.measured_flops is not None and peak:
                own.setdefault("gemm_ceiling", device.measured_flops / peak)
        values |= own
        rungs |= dict.fromkeys(own, "table")
        known = {each.name for each in fields(cls)} - {"rungs", "flops", "learned", "slowdown"}
        for name, value in (profile or {}).items():
            if name not in known:
                raise _error(name, f"profile.{name}: no such constant.{did_you_mean(name, known)}")
            values[name] = value
            rungs[name] = "here"
        learned = shipped["learned"]
        factor = learned.get(generation(device.name), 1.0) if tier == "tables" else 1.0
        return cls(**(_rates(device, shipped["devices"]) | values), rungs=rungs, slowdown=factor)

    def changed(self, **values: float) -> Tables:
        """Return a copy with some constants replaced."""
        return replace(self, **values)  # pyright: ignore[reportArgumentType]  # fields of numbers


@functools.cache
def _shipped() -> dict[str, Any]:
    text = Path(__file__).with_name("tables.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def generation(device: str) -> str:
    """Return the generation of a device by its name, or "" if no published run used a similar device."""
    name = device.rstrip("*")
    return next((make for make, names in _GENERATIONS if name.startswith(names)), "")


def _base_name(device: DeviceSpec) -> str:
    return "cpu" if device.is_cpu else device.name.rstrip("*")  # a known device with some changed numbers


def _rates(device: DeviceSpec, tables: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    own = tables.get(_base_name(device), {})
    flops = dict(device.peaks)
    half = flops.get("bf16") or flops.get("fp16") or flops.get("fp32") or 1e12
    flops = {"bf16": half, "fp16": half, "fp8": half, "fp32": flops.get("tf32", half / 2) / 8} | flops
    flops.setdefault("fp64", flops["fp32"] / 2)
    flops.setdefault("fp4", flops["fp8"])
    flops.setdefault("tf32", flops["fp32"])
    narrow = own.get("fp8_share", 1.0)
    flops |= {"fp8": max(half, flops["fp8"] * narrow), "fp4": max(half, flops["fp4"] * narrow)}
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
        "grouped_gain": own.get("grouped_gain", 1.0),
    }


def _error(field: str, message: str) -> ConfigError:
    return ConfigError([Problem(field, message)])


# Time (s) of single kernels on one device: matmuls, attention, memory-bound kernels.

Array = NDArray[np.float64]

#: Output tiles (rows, columns) of matmul kernels. Narrow tiles reuse less of the loaded data.
_TILES = ((128, 128), (128, 256), (256, 128), (64, 256), (64, 128), (64, 64))
_FULL_TILE = 128 * 256
#: Relative rate of a matmul whose inner widths are not multiples of 8 values (16 bytes). Tensor cores are then not
#: used, or loaded in small chunks.
_MISALIGNED = 0.2
#: Ramp-up length of fused attention without a mask, relative to causal attention (Shah et al. 2024, arXiv 2407.08608,
#: figures 5 and 6: with 512 tokens 0.84 and 0.66 of the rate with 16,384, forward and backward; causal 0.57).
_UNMASKED = 0.3


def gemm_s(tables: Tables, m: Any, n: Any, k: Any, batch: Any, peak: Any, widths: Any = None) -> Array:
    """Return the time (s) of `batch` matmuls of m x k by k x n matrices in 2-byte elements.

    The result is the larger of compute and memory time, plus one kernel launch. It accounts for rounding up to full
    output tiles and to full waves of tiles over the multiprocessors, and for a lower rate with a small inner width k.

    Args:
        m, n, k, batch: sizes; numbers or arrays.
        peak: peak FLOP/s.
        widths: the two feature widths, whose alignment decides the rate; None uses n and k. Give them if n or k is a
            number of tokens. A width that is not an integer counts as aligned.
    """
    m, n, k, batch = (np.asarray(each, dtype=np.float64) for each in (m, n, k, batch))
    best = np.zeros(np.broadcast(m, n, k, batch).shape)
    for rows, columns in _TILES:
        tall, wide = np.ceil(m / rows), np.ceil(n / columns)
        tiles = tall * wide * batch
        filled = tiles / (np.ceil(tiles / tables.sms) * tables.sms)
        covered = (m / (tall * rows)) * (n / (wide * columns))
        np.maximum(best, filled * covered * (rows * columns / _FULL_TILE) ** tables.tile_power, out=best)
    # Outputs of less than one wave are split along k, which uses about half of the device.
    small = m * n * batch < _FULL_TILE / 2 * tables.sms
    best = np.where(small, np.maximum(best, 0.5), best)
    rate = peak * tables.gemm_ceiling * tables.gemm_sustained * best * k / (k + tables.gemm_k0)
    flops = 2.0 * m * n * k * batch
    moved = 2.0 * batch * (m * k + k * n + m * n)
    share = aligned(*((n, k) if widths is None else widths))
    return np.maximum(flops / (rate * share), bytes_s(tables, moved)) + tables.launch_s


def aligned(n: Any, k: Any) -> Array:
    """Return the share of a matmul's rate, 0 to 1, that the alignment of its widths n and k allows."""
    narrow, inner = np.asarray(n), np.asarray(k)
    misaligned = [(width % 8 != 0) & (width % 1 == 0) for width in (narrow, inner)]
    return np.where(misaligned[0], _MISALIGNED, 1.0) * np.where(misaligned[1], _MISALIGNED, 1.0)


def core_s(tables: Tables, flops: Any, moved: Any, head_dim: int, peak: Any) -> Array:
    """Return the time (s) of the two batched matmuls of unfused attention, which move `moved` bytes."""
    rate = peak * tables.gemm_ceiling * tables.core_eff * (1.0 if head_dim % 8 == 0 else _MISALIGNED)
    return np.maximum(flops / rate, bytes_s(tables, moved)) + 2 * tables.launch_s


def bytes_s(tables: Tables, moved: Any) -> Array:
    """Return the time (s) to read or write `moved` bytes of device memory sequentially."""
    return np.asarray(moved, dtype=np.float64) / (tables.memory_rate * tables.memory_eff)


def flash_s(tables: Tables, flops: Any, seq_len: Any, backward: bool, peak: Any, *, masked: bool = True) -> Array:
    """Return the time (s) of fused attention.

    Args:
        flops: FLOPs that are executed, after a causal mask or a window.
        seq_len: maximum number of keys that a query attends to.
        peak: peak FLOP/s.
        masked: True for a causal mask, which leaves some tiles partial.
    """
    share = tables.attn_bwd if backward else tables.attn_fwd
    ramp = np.asarray(seq_len) / (np.asarray(seq_len) + tables.attn_s0 * (1.0 if masked else _UNMASKED))
    return np.asarray(flops) / (peak * tables.gemm_ceiling * share * ramp) + tables.launch_s


# Time (s) of collectives by the location of their ranks: inside one scale-up domain, or over the network.

#: Volume of a ring collective in full buffers, before the factor (n - 1)/n.
RING_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


@dataclass(frozen=True, slots=True)
class Fabric:
    """Links of a cluster, with the rates (bytes/s) and start-up times (s) that collectives achieve.

    Attributes:
        link_rate, link_alpha_s: links inside a scale-up domain.
        nic_rate, nic_alpha_s: network adapters.
        half_bytes: buffer size at which a ring collective reaches half of its rate.
        domain: devices of a scale-up domain.
        mesh: True if each device has a separate link to every other device of its domain.
        rack: devices of a rack; 0 if the network is not divided into racks.
        thinner: bandwidth of a rack's adapters divided by the bandwidth of its links to other racks.
    """

    link_rate: float
    link_alpha_s: float
    nic_rate: float
    nic_alpha_s: float
    half_bytes: float
    domain: int
    mesh: bool
    rack: int = 0
    thinner: float = 1.0

    @classmethod
    def of(cls, tables: Tables, devices_per_node: int, rack_nodes: int = 0, oversubscription: float = 1.0) -> Fabric:
        """Return the links that the tables describe. A scale-up domain of up to 16 devices is limited to one node.

        Args:
            rack_nodes: nodes of a rack; 0 without racks.
            oversubscription: as in `thinner`.
        """
        domain = min(tables.link_domain, devices_per_node) if tables.link_domain <= 16 else tables.link_domain
        return cls(
            link_rate=tables.link_rate * tables.link_eff,
            link_alpha_s=tables.link_alpha_s,
            nic_rate=tables.nic_rate * tables.nic_eff,
            nic_alpha_s=tables.nic_alpha_s,
            half_bytes=tables.half_bytes,
            domain=max(1, domain),
            mesh=tables.link_mesh,
            rack=rack_nodes * devices_per_node,
            thinner=oversubscription,
        )

    def in_rack(self, n: Any, stride: Any) -> Array:
        """Return how many ranks of a group of n, `stride` apart, are in one rack; n without racks."""
        n = np.asarray(n, dtype=np.float64)
        return np.clip(self.rack // np.maximum(1, np.asarray(stride)), 1, n) if self.rack else n

    def inside(self, n: Any, stride: Any) -> Array:
        """Return how many ranks of a group of n, `stride` apart, are in one scale-up domain."""
        return np.clip(self.domain // np.maximum(1, np.asarray(stride)), 1, np.asarray(n)).astype(np.float64)

    def ring_s(self, kind: str, size: Any, n: Any, stride: Any) -> Array:
        """Return the time (s) of an all_reduce, all_gather or reduce_scatter over n ranks that are `stride` apart.

        Parallel groups are assumed to communicate at the same time, so that each device has its own share of the
        network.

        Args:
            kind: a key of RING_PASSES.
            size: bytes of the unsharded buffer.
        """
        n = np.asarray(n, dtype=np.float64)
        size = np.asarray(size, dtype=np.float64)
        passes = RING_PASSES[kind]
        inner = self.inside(n, stride)
        outer = np.ceil(n / inner)
        moved = passes * (n - 1) / n * size
        link = self.link_rate * np.where(self.mesh, (inner - 1) / max(1, self.domain - 1), 1.0)
        # A ring leaves each rack only once, however many of its nodes are in that rack. So only some of a rack's rings
        # leave it.
        near = self.in_rack(n, stride)
        nic = self.nic_rate * np.where(near < n, np.minimum(1.0, near / inner / self.thinner), 1.0)
        rate = np.where(outer > 1, np.minimum(np.maximum(link, nic), nic * inner), link)
        # Ring algorithms for few nodes; tree-like algorithms for many.
        hops = np.minimum(outer - 1, (2 if kind == "all_reduce" else 8) * np.log2(np.maximum(2, outer)))
        alpha = self.link_alpha_s + np.where(outer > 1, self.nic_alpha_s * passes * hops, 0.0)
        ramp = 1.0 + np.sqrt(self.half_bytes / np.maximum(size, 1.0))
        return np.where(n > 1, alpha + moved / np.maximum(rate, 1.0) * ramp, 0.0)

    def all_to_all_s(self, size: Any, n: Any, stride: Any, copies: int | None = None) -> Array:
        """Return the time (s) of an all-to-all over n ranks that are `stride` apart.

        Args:
            size: bytes that each rank sends, including its own share.
            copies: number of experts per token, if a node and each rank in it get a token at most once, as in DeepEP
                (DeepSeek-AI 2024, arXiv 2412.19437). Transfers inside a node then overlap with those between nodes. If
                None, a token is sent once for each expert.
        """
        n = np.asarray(n, dtype=np.float64)
        size = np.asarray(size, dtype=np.float64)
        inner = self.inside(n, stride)
        outer = np.ceil(n / inner)
        near = size * (inner - 1) / n / self.link_rate
        crossing = size * (n - inner) / n
        if copies is not None:
            token = size / copies
            near = token * _reached(n, copies) * (inner - 1) / inner / self.link_rate
            crossing = token * _reached(outer, copies) * (outer - 1) / outer
        # Share of the traffic between nodes that goes to other racks.
        leaving = (n - self.in_rack(n, stride)) / np.maximum(1.0, n - inner)
        crossing = crossing * np.maximum(1.0, leaving * self.thinner)
        far = crossing / self.nic_rate
        alpha = self.link_alpha_s + np.where(outer > 1, self.nic_alpha_s * np.sqrt(outer), 0.0)
        travel = far + near if copies is None else np.maximum(far, near)
        return np.where(n > 1, alpha + travel, 0.0)

    def send_s(self, size: Any, stride: Any) -> Array:
        """Return the time (s) to send `size` bytes to the rank whose index is higher by `stride`."""
        near = np.asarray(stride) < self.domain
        leaves = (np.asarray(stride) >= self.rack) if self.rack else False
        rate = np.where(near, self.link_rate, self.nic_rate / np.where(leaves, self.thinner, 1.0))
        return np.where(near, self.link_alpha_s, self.nic_alpha_s) + np.asarray(size, dtype=np.float64) / rate


def _reached(places: Array, copies: int) -> Array:
    """Return how many of `places` nodes or ranks are expected to receive a token that is sent to `copies` experts.

    Each expert is equally likely to be at any of them.
    """
    return places * (1 - (1 - 1 / places) ** copies)
