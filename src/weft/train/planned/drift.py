"""What of a run is not as planned: which part of a step drifted, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from weft.units import format_bytes, format_seconds

#: How far (share of the plan) a run may be from its plan, and from where on it has come back.
BEYOND, BACK = 0.15, 0.10


@dataclass(frozen=True, slots=True)
class Drift:
    """One finding. what: "step", a part of a step such as "over dp", or "memory". ratio: measured over planned."""

    what: str
    ratio: float
    text: str


def drifts(
    planned: Mapping[str, float],
    measured: Mapping[str, float],
    memory: tuple[float, float] | None = None,
    before: frozenset[str] = frozenset(),
) -> list[Drift]:
    """Return what is off by more than 15 % of the planned step, or of the planned memory.

    A step that is off names the part that contributes most; without that, a part that is off by so much that only
    another one hides it is named.

    Args:
        planned: seconds of one step by part.
        measured: the same.
        memory: bytes (planned, measured), where they can be compared.
        before: what had drifted when last asked: it stays until it is within 10 %.
    """
    step, took = sum(planned.values()), sum(measured.values())
    found: list[Drift] = []
    if step <= 0 or took <= 0:
        return found
    off = {part: measured.get(part, 0.0) - planned.get(part, 0.0) for part in {**planned, **measured}}
    if abs(took / step - 1) > (BACK if "step" in before else BEYOND):
        longer = took > step
        culprit = max(off, key=lambda part: off[part] if longer else -off[part])
        found.append(Drift("step", took / step, f"a step {_beside(took, step)}: {_part(culprit, planned, measured)}"))
    for part, more in off.items():
        limit = BACK if part in before else BEYOND
        if not any(one.what == "step" for one in found) and abs(more) > limit * step:
            ratio = measured.get(part, 0.0) / planned[part] if planned.get(part) else float("inf")
            found.append(Drift(part, ratio, _part(part, planned, measured)))
    if (
        memory is not None
        and memory[0] > 0
        and abs(memory[1] / memory[0] - 1) > (BACK if "memory" in before else BEYOND)
    ):
        wanted, used = memory
        share = used / wanted - 1
        text = f"memory: {format_bytes(int(used))}, {abs(share):.0%} {'more' if share > 0 else 'less'} than planned"
        found.append(Drift("memory", used / wanted, f"{text} ({format_bytes(int(wanted))})"))
    return found


def _beside(took: float, planned: float) -> str:
    ratio, wanted = took / planned, format_seconds(planned)
    if ratio >= 3:
        return f"takes {format_seconds(took)}, {ratio:.1f} times what was planned ({wanted})"
    word = "more" if ratio > 1 else "less"
    return f"takes {format_seconds(took)}, {abs(ratio - 1):.0%} {word} than planned ({wanted})"


def _part(part: str, planned: Mapping[str, float], measured: Mapping[str, float]) -> str:
    wanted = planned.get(part, 0.0)
    told = f"planned {format_seconds(wanted)}" if wanted else "of which the plan knows nothing"
    return f"{part} takes {format_seconds(measured.get(part, 0.0))}, {told}"
