"""What one device can do, and what several kinds at one job can: a plan gives all equal work, so the least of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

#: Of a host's memory, what all its ranks may pin: as the setting `memory.pinned_limit` has it by default.
_PINNED_SHARE = 0.6
#: The name of a host's cores as a device.
HERE = "here"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What one device can do. None is not known; every rate is for one device and one direction.

    peaks: dense peak FLOP/s by precision. measured_flops: the best bf16 matmul that was measured, in FLOP/s.
    scale_up_bytes_per_s: the fast links between the devices of one domain of `scale_up_domain` devices.
    nic_bytes_per_s: its share of the network between nodes. host_bytes_per_s: the link to host memory.
    host_memory_bytes: its share of the memory of its host.
    sources: D data sheet, S published measurements, W press and web (uncertain).
    """

    name: str
    title: str = ""
    peaks: tuple[tuple[str, float], ...] = ()
    memory_bytes: int = 0
    memory_bytes_per_s: float = 0.0
    scale_up_bytes_per_s: float = 0.0
    scale_up_domain: int = 1
    scale_up_topology: str = "switch"
    nic_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    host_memory_bytes: float | None = None
    watts: float | None = None
    measured_flops: float | None = None
    aliases: tuple[str, ...] = ()
    torch_names: tuple[str, ...] = ()
    sources: str = ""
    note: str = ""

    @property
    def is_cpu(self) -> bool:
        """Whether it is a rank's share of the cores of a host that was measured (`planner/measured/here.py`)."""
        return self.name == HERE

    @property
    def pinnable_bytes(self) -> float:
        """What its rank may pin of its host's memory; where nothing is known of that, it has twice the device's."""
        return _PINNED_SHARE * (2.0 * self.memory_bytes if self.host_memory_bytes is None else self.host_memory_bytes)

    def peak_flops(self, precision: str) -> float | None:
        """Return the dense peak FLOP/s of "bf16", "fp16", "fp8", "fp4" or "tf32"; None where the device has none."""
        return dict(self.peaks).get(precision)


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
