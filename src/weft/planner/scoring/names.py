"""Devices and networks as published tables name them."""

from __future__ import annotations

import re
from dataclasses import replace

from weft.errors import ConfigError
from weft.planner.scoring.stacks import known_network
from weft.spec import ClusterSpec, DeviceSpec
from weft.spec.cluster import device, devices

_MEMORY = re.compile(r"(\d+)gb")
_WATTS = re.compile(r"(\d+)w\b")
#: Rate of memory, in GB/s, that a name's memory type stands for, by device.
_MEMORY_TYPES = {("h100", "hbm2e"): 2400.0}
#: Clock against power cap: matmuls at 500 of 700 W keep about 0.75 of their rate.
_POWER_EXPONENT = 0.85
_PER_NODE = (
    re.compile(r"(?P<count>\d+)\s?x\s?(?P<gbit>\d+)\s?gb(?:it)?(?:/s|ps)?"),
    re.compile(r"(?P<gbit>\d+)\s?gbps(?: roce)?(?: node-node| per node)"),
    re.compile(r"network (?P<gbit>\d+)\s?gb/s per node"),
)
_PER_DEVICE = re.compile(r"(\d+)\s?gb/s per gpu")


def device_named(name: str) -> DeviceSpec:
    """The device that a table means by such as "a100-80gb-sxm" or "h100-96gb-hbm2e-500w". Raises ConfigError."""
    text = name.strip().lower().replace("_", "-").replace("nvidia-", "").replace("amd-", "")
    spec = _base(text)
    changes: dict[str, object] = {}
    memory, watts = _MEMORY.search(text), _WATTS.search(text)
    if memory and abs(int(memory[1]) * 2**30 - spec.memory_bytes) > 0.02 * spec.memory_bytes:
        changes["memory_bytes"] = int(memory[1]) * 2**30
    for (family, kind), rate in _MEMORY_TYPES.items():
        if spec.name == family and kind in text:
            changes["memory_bytes_per_s"] = rate * 1e9
    if watts and spec.watts and spec.measured_flops and int(watts[1]) < spec.watts:
        slower = (int(watts[1]) / spec.watts) ** _POWER_EXPONENT
        changes |= {"watts": float(watts[1]), "measured_flops": spec.measured_flops * slower}
    if "sxm3" in text:  # the sixteen of a DGX-2 hang on switches
        changes |= {"scale_up_domain": 16, "scale_up_topology": "switch"}
    return replace(spec, name=f"{spec.name}*", **changes) if changes else spec  # pyright: ignore[reportArgumentType]  # checked when it is made


def _base(text: str) -> DeviceSpec:
    for candidate in (text, *_shortened(text)):
        known = {alias: spec for spec in devices().values() for alias in (spec.name, *spec.aliases)}
        if candidate in known:
            return known[candidate]
    return device(text)  # raises, with a hint


def _shortened(text: str) -> list[str]:
    words = text.split("-")
    family = words[0]
    memory = _MEMORY.search(text)
    found: list[str] = []
    if "pcie" in words:
        found.append(f"{family}-pcie")
    if "nvl" in words or "nvl72" in words:
        found.append(f"{family}-nvl")
    if memory:
        found.append(f"{family}-{memory[1]}")
    return [*found, "-".join(words[:2]), family]


def cluster_of(name: str, num_devices: int, per_node: int, text: str) -> ClusterSpec:
    """The cluster of a run: `text` (notes, lower case) may give the network. Raises ConfigError."""
    spec = device_named(name)
    rate = network_rate(text, per_node)
    if rate is not None:
        spec = replace(spec, nic_bytes_per_s=rate)
    per_node = max(1, min(per_node, num_devices))
    return ClusterSpec(nodes=max(1, -(-num_devices // per_node)), devices_per_node=per_node, device=spec)


def network_rate(text: str, per_node: int) -> float | None:
    """Bytes per second and device of the network between nodes, where the text says so."""
    each = _PER_DEVICE.search(text)
    if each:
        return float(each[1]) / 8 * 1e9
    for pattern in _PER_NODE:
        match = pattern.search(text)
        if match:
            count = int(match.groupdict().get("count") or 1)
            return count * float(match["gbit"]) / 8 * 1e9 / max(1, per_node)
    known = known_network(text)
    return known / max(1, per_node) if known is not None else None


__all__ = ["ConfigError", "cluster_of", "device_named", "network_rate"]
