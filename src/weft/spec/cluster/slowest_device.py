"""Several kinds of devices at one job: a plan gives all equal work, so each number is that of the slowest kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.spec.cluster.cluster_spec import DeviceSpec


def slowest_of(kinds: Sequence[tuple[DeviceSpec, int]]) -> DeviceSpec:
    """Return a device that is as slow and as small as the worst of these in each respect, named after the slowest.

    Collectives, stages and barriers wait for the slowest of them at every turn. Its power is the mean.

    Args:
        kinds: devices, and how many there are of each.
    """
    specs = [spec for spec, _ in kinds]
    base = min(specs, key=lambda spec: spec.measured_flops or spec.peak_flops("bf16") or spec.peak_flops("fp16") or 0.0)
    peaks = [dict(spec.peaks) for spec in specs]
    shared = {name: min(each[name] for each in peaks) for name in peaks[0] if all(name in each for each in peaks)}
    drawn = [spec.watts for spec in specs]
    count = sum(number for _, number in kinds)
    mean = None if None in drawn else sum((spec.watts or 0.0) * number for spec, number in kinds) / count
    return replace(
        base,
        name=f"{base.name.rstrip('*')}*",
        peaks=tuple(shared.items()),
        memory_bytes=min(spec.memory_bytes for spec in specs),
        memory_bytes_per_s=min(spec.memory_bytes_per_s for spec in specs),
        scale_up_bytes_per_s=min(spec.scale_up_bytes_per_s for spec in specs),
        scale_up_domain=min(spec.scale_up_domain for spec in specs),
        nic_bytes_per_s=_least(spec.nic_bytes_per_s for spec in specs),
        host_bytes_per_s=_least(spec.host_bytes_per_s for spec in specs),
        host_memory_bytes=_least(spec.host_memory_bytes for spec in specs),
        watts=mean,
    )


def _least(values: Iterable[float | None]) -> float | None:
    """The least of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return min(known, default=None)
