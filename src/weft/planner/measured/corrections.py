"""Corrections from runs: for each part of a step, the ratio of measured to predicted time, shrunk towards 1."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, Problem
from weft.planner.measured.machine_profile import Lesson, Profile
from weft.units import counted

#: File in a run's folder with expected and measured times of its steps.
RUN_FILE = "measured.json"

#: Terms of each part of a step.
PARTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("gemm", "attention", "memory_bound", "host", "recompute", "frozen"),
    "over tp": ("tp",),
    "over cp": ("cp",),
    "over ep": ("ep",),
    "over dp": ("dp_exposed", "contention"),
    "stages": ("pp_p2p", "bubble"),
    "optimizer": ("optimizer",),
}
#: Parts without a factor.
_FOLLOWS = ("stages",)
#: Weight of the prior that predictions are correct, in number of runs.
_DOUBT = 1.0
#: A ratio beyond this limit has another cause: something that the estimate does not model, or a disturbed run.
_MOST = 4.0
#: A part with less than this share of a step is ignored, since its times are noise.
_LEAST_SHARE = 0.02


def parts_of(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the time (s) of a step by part, from its time by term. Parts that take no time are left out."""
    found = {name: sum(terms.get(term, 0.0) for term in inside) for name, inside in PARTS.items()}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def part_of_kind(kind: str) -> str:
    """Return the part of a step to which a kind of time in a run's profile belongs.

    Communication over data-parallel axes, alone or joined with others, and over all ranks belongs to "over dp", and
    communication between stages to "stages". All other kinds are parts themselves.
    """
    if not kind.startswith("over "):
        return kind
    axes = kind.removeprefix("over ")
    if "dp" in axes or axes == "world":
        return "over dp"
    return "stages" if axes in ("pp", "ends") else kind


def measured_parts(kinds: Mapping[str, float]) -> dict[str, float]:
    """Return the time (s) of a step by part, from its time by kind."""
    found: dict[str, float] = {}
    for kind, seconds in kinds.items():
        part = part_of_kind(kind)
        found[part] = found.get(part, 0.0) + seconds
    return found


def ratios(predicted: Mapping[str, float], measured: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Return (part, ratio of measured to predicted time) for the parts of one step, with ratios limited to 1/4 to 4.

    Parts without a prediction, parts with less than 2 % of the measured time, and "stages" are left out.
    """
    whole = sum(measured.values())
    found: list[tuple[str, float]] = []
    for name in PARTS:
        mine, theirs = predicted.get(name, 0.0), measured.get(name, 0.0)
        if name in _FOLLOWS or mine <= 0 or theirs < _LEAST_SHARE * whole:
            continue
        found.append((name, round(min(_MOST, max(1 / _MOST, theirs / mine)), 4)))
    return tuple(found)


def part_factors(lessons: Sequence[Lesson]) -> dict[str, float]:
    """Return the correction factor of each part with ratios from runs: their geometric mean, shrunk towards 1."""
    logs: dict[str, list[float]] = {}
    for lesson in lessons:
        for name, ratio in lesson.ratios:
            logs.setdefault(name, []).append(math.log(ratio))
    return {name: math.exp(sum(each) / (len(each) + _DOUBT)) for name, each in logs.items()}


def factors(profile: Profile) -> dict[str, float]:
    """Return the correction factor of each term of the parts with ratios from runs."""
    found = part_factors(profile.learned)
    return {term: found[part] for part, inside in PARTS.items() if part in found for term in inside}


def lesson_words(profile: Profile) -> str:
    """Return text such as 'compute x 1.08, over tp x 0.93 (learned from 2 runs)', or "" without corrections."""
    found = part_factors(profile.learned)
    if not found:
        return ""
    runs = len(profile.learned)
    told = ", ".join(f"{name} x {value:.2f}" for name, value in found.items())
    return f"{told} (learned from {counted(runs, 'run')})"


def lesson_of(run: Path) -> Lesson:
    """Return the corrections from a finished run.

    Raises:
        ConfigError: for a folder without a valid `measured.json`, or a run without an estimate.
    """
    path = run / RUN_FILE
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        rule = f"there is no {path}. Give the folder of a run that `weft train` has finished"
        raise _error(f"learn={run}: {rule}.") from None
    except ValueError as error:
        raise _error(f"learn={run}: {path} is not JSON text ({error}). Give another run.") from None
    try:
        return _lesson(run, table)
    except (KeyError, TypeError, AttributeError) as error:
        raise _error(f"learn={run}: {path} lacks {error}. Give a run of this version of Weft.") from None


def _lesson(run: Path, table: Mapping[str, Any]) -> Lesson:
    expected = table["expected"]
    if expected is None:
        raise _error(
            f"learn={run}: the run has no estimate to compare with ({table['unknown']}). Calibrate, then train again."
        )
    taught = expected.get("factors", {})
    # Undo earlier corrections in the prediction, so that a correction is not applied twice.
    plain = {term: seconds / taught.get(term, 1.0) for term, seconds in expected["terms"].items()}
    return Lesson(
        run=str(run.resolve()),
        plan=str(table["plan"]),
        model=str(table["model"]),
        steps=int(table["steps"]),
        ratios=ratios(parts_of(plain), table["measured"]["parts"]),
    )


def learn(run: Path, profile: Profile) -> Profile:
    """Return the profile with the corrections from a run.

    Raises:
        ConfigError: for a run on another kind of device, and as in `lesson_of`.
    """
    lesson = lesson_of(run)
    kind = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))["device"]
    if kind != profile.machine.kind:
        rule = f"it ran on {kind}, and the profile is of {profile.machine.kind}"
        raise _error(f"learn={run}: {rule}. Give a run of this machine.")
    return profile.with_lesson(lesson)


def _error(message: str) -> ConfigError:
    return ConfigError([Problem("learn", message)])
