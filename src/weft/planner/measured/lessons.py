"""What runs teach a profile: for each part of a step one factor, measured over predicted, held back by doubt.

A run shows seconds by part, not by term: what it computed, what each axis of the mesh made it wait, the optimizer. The
factor of a part is the geometric mean of the runs' ratios, with one run's worth of doubt that it is 1: a first run
moves an estimate half of the way. The bubble and messages of a pipeline are no part: they follow from the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, Problem
from weft.planner.measured.profile import Lesson, Profile
from weft.units import counted

#: What a run leaves in its folder: expected and measured seconds of its steps.
RUN_FILE = "measured.json"

#: Part -> the terms of a step in it.
PARTS: Mapping[str, tuple[str, ...]] = {
    "compute": ("gemm", "attention", "memory_bound", "host", "recompute", "frozen"),
    "over tp": ("tp",),
    "over cp": ("cp",),
    "over ep": ("ep",),
    "over dp": ("dp_exposed", "contention"),
    "stages": ("pp_p2p", "bubble"),
    "optimizer": ("optimizer",),
}
#: Parts that get no factor.
_FOLLOWS = ("stages",)
#: How many runs' worth of doubt there is that a part is predicted right.
_DOUBT = 1.0
#: A ratio beyond this is no lesson but another thing: a part that the estimate does not know, or a disturbed run.
_MOST = 4.0
#: A part below this share of a step teaches nothing: it is measured and predicted as noise.
_LEAST_SHARE = 0.02


def parts_of(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by part."""
    found = {name: sum(terms.get(term, 0.0) for term in inside) for name, inside in PARTS.items()}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def part_of_kind(kind: str) -> str:
    """The part that a kind of a run's time book belongs to: axes that are joined count as what they are joined for."""
    if not kind.startswith("over "):
        return kind
    axes = kind.removeprefix("over ")
    if "dp" in axes or axes == "world":
        return "over dp"
    return "stages" if axes in ("pp", "ends") else kind


def measured_parts(kinds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by part, from a time book's by kind."""
    found: dict[str, float] = {}
    for kind, seconds in kinds.items():
        part = part_of_kind(kind)
        found[part] = found.get(part, 0.0) + seconds
    return found


def ratios(predicted: Mapping[str, float], measured: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """Measured over predicted of each part that both know and that is worth looking at. Both: seconds of one step."""
    whole = sum(measured.values())
    found: list[tuple[str, float]] = []
    for name in PARTS:
        mine, theirs = predicted.get(name, 0.0), measured.get(name, 0.0)
        if name in _FOLLOWS or mine <= 0 or theirs < _LEAST_SHARE * whole:
            continue
        found.append((name, round(min(_MOST, max(1 / _MOST, theirs / mine)), 4)))
    return tuple(found)


def part_factors(lessons: Sequence[Lesson]) -> dict[str, float]:
    """Factor of each part that runs taught something about."""
    logs: dict[str, list[float]] = {}
    for lesson in lessons:
        for name, ratio in lesson.ratios:
            logs.setdefault(name, []).append(math.log(ratio))
    return {name: math.exp(sum(each) / (len(each) + _DOUBT)) for name, each in logs.items()}


def factors(profile: Profile) -> dict[str, float]:
    """Factor of each term."""
    found = part_factors(profile.learned)
    return {term: found[part] for part, inside in PARTS.items() if part in found for term in inside}


def lesson_words(profile: Profile) -> str:
    """Return 'compute x 1.08, over tp x 0.93 (learned from 2 runs)'; nothing where nothing was learned."""
    found = part_factors(profile.learned)
    if not found:
        return ""
    runs = len(profile.learned)
    told = ", ".join(f"{name} x {value:.2f}" for name, value in found.items())
    return f"{told} (learned from {counted(runs, 'run')})"


def lesson_of(run: Path) -> Lesson:
    """What a finished run teaches. Raises ConfigError for a folder without `measured.json`, or one without estimate."""
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
    # Against what the laws alone say: what was learned before must not be learned twice.
    plain = {term: seconds / taught.get(term, 1.0) for term, seconds in expected["terms"].items()}
    return Lesson(
        run=str(run.resolve()),
        plan=str(table["plan"]),
        model=str(table["model"]),
        steps=int(table["steps"]),
        ratios=ratios(parts_of(plain), table["measured"]["parts"]),
    )


def learn(run: Path, profile: Profile) -> Profile:
    """Return the profile with what a run teaches.

    Raises:
        ConfigError: for a run of another kind of device, or one without estimate and measured times.
    """
    lesson = lesson_of(run)
    kind = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))["device"]
    if kind != profile.machine.kind:
        rule = f"it ran on {kind}, and the profile is of {profile.machine.kind}"
        raise _error(f"learn={run}: {rule}. Give a run of this machine.")
    return profile.with_lesson(lesson)


def _error(message: str) -> ConfigError:
    return ConfigError([Problem("learn", message)])
