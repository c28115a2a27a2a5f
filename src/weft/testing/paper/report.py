"""What a process on paper says when it ends. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """What a process on paper says when it ends, as JSON. Seconds are simulated: see `clock.py` for the guesses.

    num_bytes: read and written by kernels. syncs: waits of the host, by what and line; a copy that blocks is one.
    copies, collectives, races: how often, by what. mismatch: the error of a tensor on the wrong device, or "".
    busy_s: of the default stream. idle_s: its waiting, by reason. name: of the script or the plan. error: what ended a
    plan early, or "".
    """

    kernels: int = 0
    num_bytes: int = 0
    syncs: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    collectives: dict[str, int] = field(default_factory=dict)
    races: dict[str, int] = field(default_factory=dict)
    step_s: float = 0.0
    busy_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=dict)
    mismatch: str = ""
    name: str = ""
    error: str = ""

    @property
    def num_syncs(self) -> int:
        return sum(self.syncs.values())

    @property
    def num_blocking(self) -> int:
        """Copies that the host waits for."""
        return sum(number for name, number in self.copies.items() if ", blocking @" in name)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """For people."""
        told = [
            f"{self.name}: {self.kernels} kernels, {self.num_bytes / 1e9:.3f} GB; host waits {self.num_syncs} times; "
            f"{sum(self.copies.values())} copies, {self.num_blocking} of them blocking; "
            f"simulated {self.step_s * 1e3:.2f} ms, device busy {self.busy_s * 1e3:.2f} ms"
        ]
        for title, found in (
            ("wait", self.syncs),
            ("copy", self.copies),
            ("collective", self.collectives),
            ("race", self.races),
        ):
            told += [f"  {title:10} {number:5} x {name}" for name, number in sorted(found.items(), key=lambda x: -x[1])]
        told += [f"  idle {seconds * 1e3:8.2f} ms  {why}" for why, seconds in sorted(self.idle_s.items())]
        return told + [
            f"  {title}: {text}" for title, text in (("wrong device", self.mismatch), ("ended by", self.error)) if text
        ]
