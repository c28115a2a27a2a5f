"""The machines: what one device can do, and how many there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "ClusterSpec",
    "DeviceSpec",
    "capped",
    "device",
    "device_by_torch_name",
    "devices",
]

if TYPE_CHECKING:
    from weft.spec.cluster.cluster_spec import ClusterSpec, capped, device, device_by_torch_name, devices
    from weft.spec.cluster.device_spec import DeviceSpec

__getattr__ = loads(
    __name__,
    {
        "ClusterSpec": ".cluster_spec",
        "DeviceSpec": ".device_spec",
        "capped": ".cluster_spec",
        "device": ".cluster_spec",
        "device_by_torch_name": ".cluster_spec",
        "devices": ".cluster_spec",
    },
)
