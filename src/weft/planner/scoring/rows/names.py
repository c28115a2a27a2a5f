"""Devices and networks as published tables name them."""

from __future__ import annotations

import re
from dataclasses import replace

from weft.errors import ConfigError
from weft.planner.scoring.rows.bandwidths import device_gib, memory_bytes_per_s, network_bytes_per_s
from weft.planner.scoring.rows.stacks import known_network
from weft.spec import ClusterSpec, DeviceSpec
from weft.spec.cluster import capped, device, devices

_WATTS = re.compile(r"(\d+)\s?w\b")
#: Rate of memory, in GB/s, that a name's memory type stands for, by device.
_MEMORY_TYPES = {("h100", "hbm2e"): 2400.0}


def device_named(name: str) -> DeviceSpec:
    """The device that a table means by such as "a100-80gb-sxm" or "h100-96gb-hbm2e-500w". Raises ConfigError."""
    text = name.strip().lower().replace("_", "-").replace("nvidia-", "").replace("amd-", "")
    spec = _base(text)
    changes: dict[str, object] = {}
    memory, watts = device_gib(text), _WATTS.search(text)
    if memory and abs(memory * 2**30 - spec.memory_bytes) > 0.02 * spec.memory_bytes:
        changes["memory_bytes"] = memory * 2**30
    for (family, kind), rate in _MEMORY_TYPES.items():
        if spec.name == family and kind in text:
            changes["memory_bytes_per_s"] = rate * 1e9
    if watts and spec.watts and spec.measured_flops and int(watts[1]) < spec.watts:
        limited = capped(replace(spec, watts=float(watts[1])), spec.watts)
        changes |= {"watts": limited.watts, "measured_flops": limited.measured_flops}
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
    memory = device_gib(text)
    found: list[str] = []
    if "pcie" in words:
        found.append(f"{family}-pcie")
    if "nvl" in words or "nvl72" in words:
        found.append(f"{family}-nvl")
    if memory:
        found.append(f"{family}-{memory}")
    return [*found, "-".join(words[:2]), family]


def cluster_of(name: str, num_devices: int, per_node: int, text: str) -> ClusterSpec:
    """Return the cluster of a run.

    Args:
        name: of the device.
        num_devices: of the run.
        per_node: devices of a node.
        text: notes, as they were written: they may give the rates of network and memory.

    Raises:
        ConfigError: for an unknown device.
    """
    spec = device_named(name)
    rate, memory = network_rate(text, per_node), memory_bytes_per_s(text)
    if rate is not None:
        spec = replace(spec, nic_bytes_per_s=rate)
    if memory is not None:
        spec = replace(spec, memory_bytes_per_s=memory)
    per_node = max(1, min(per_node, num_devices))
    return ClusterSpec(nodes=max(1, -(-num_devices // per_node)), devices_per_node=per_node, device=spec)


def network_rate(text: str, per_node: int) -> float | None:
    """Bytes per second and device of the network between nodes, where the text says so or its machine is known."""
    stated = network_bytes_per_s(text, per_node)
    if stated is not None:
        return stated
    known = known_network(text.lower())
    return known / max(1, per_node) if known is not None else None


__all__ = ["ConfigError", "cluster_of", "device_named", "network_rate"]
