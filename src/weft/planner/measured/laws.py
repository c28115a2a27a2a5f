"""Cost models of a machine's operations, fitted to measurements: cost per call, per value and per operation.

A cost model ("law") is a sum of terms with non-negative coefficients, so that more work never takes less time.
Coefficients are fitted to a profile's measurements of one operation, by relative least squares.

    matmuls       1, m n k, m n, m k, n k       area terms for reading, writing and short edges
    attention     1, rows width, rows keys width
    element-wise  1, tokens, tokens width
    embedding     1, tokens width, table
    optimizer     1, parameters
    transfers     1, bytes
    collectives   1, sqrt(bytes), bytes         latency, ramp-up, rate
    meeting       1, sqrt(matmuls), matmuls     latency, and waiting of ranks after this many matmuls

Corrections learned from runs are factors on the terms of a step.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import ConfigError, Problem
from weft.planner.measured.machine_profile import Lesson, Measurement, Profile
from weft.units import counted

Array = NDArray[np.float64]

_PRODUCTS = ("linear_f", "linear_dx", "linear_dw")
#: Size of the matmul between two collectives, which takes about a millisecond on one core.
BETWEEN = (256, 512, 256)
#: Size of the layer that is timed as a unit: tokens, width, feed-forward width, heads. See calibrate/compute.py.
TINY = (16, 64, 128, 4)
#: Operations of the optimizer and copies, which use fp32 under every plan.
_ALWAYS_FP32 = ("adamw", "clip", "host_adamw", "to_host", "to_device")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift", "send")


def _terms(op: str) -> Callable[..., list[Any]]:
    """Return the function that computes the terms of an operation's cost model from its size."""
    if op in _PRODUCTS:
        return _product
    if op in ("attention_f", "attention_b"):
        return _attention
    if op == "embedding":
        return _embedding
    if op in ("adamw", "clip", "host_adamw", "to_host", "to_device"):
        return _count
    return _ramp if op in (*_COLLECTIVES, "meeting") else _passes


def _product(m: Any, n: Any, k: Any) -> list[Any]:
    return [1.0, m * n * k, m * n, m * k, n * k]


def _attention(b: Any, h: Any, s: Any, c: Any, keys: Any = None) -> list[Any]:
    return [1.0, b * h * s * c, b * h * s * c * (s if keys is None else keys)]


def _embedding(t: Any, d: Any, v: Any) -> list[Any]:
    return [1.0, t * d, v * d]


def _count(count: Any) -> list[Any]:
    return [1.0, count]


def _ramp(size: Any) -> list[Any]:
    return [1.0, np.sqrt(size), size]


def _passes(t: Any, d: Any) -> list[Any]:
    return [1.0, t, t * d]


@dataclass(frozen=True, slots=True)
class Law:
    """Fitted cost model of one operation: coefficients of its terms.

    Attributes:
        error: relative root mean square error of the fit.
    """

    op: str
    coefficients: tuple[float, ...]
    error: float

    def seconds(self, *size: Any) -> Array:
        """Return the time (s) of a call for each size."""
        size = tuple(np.asarray(each, dtype=np.float64) for each in size)
        terms = zip(self.coefficients, _terms(self.op)(*size), strict=True)
        return np.asarray(sum(coefficient * term for coefficient, term in terms), dtype=np.float64)


def fit_law(op: str, samples: Sequence[Measurement]) -> Law:
    """Fit a cost model to measurements."""
    rows = np.array([_terms(op)(*map(float, sample.size)) for sample in samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    coefficients = _not_negative(rows / seconds[:, None])
    error = float(np.sqrt(np.mean((rows @ coefficients / seconds - 1) ** 2)))
    return Law(op, tuple(map(float, coefficients)), error)


def _not_negative(rows: Array) -> Array:
    """Solve least squares of rows @ x = 1 with x >= 0 exactly: the best non-negative solution over subsets of terms."""
    count = rows.shape[1]
    scale = np.abs(rows).max(axis=0)
    best, least = np.zeros(count), np.inf
    for size in range(1, min(count, len(rows)) + 1):
        for chosen in map(list, itertools.combinations(range(count), size)):
            part = rows[:, chosen] / scale[chosen]
            found = np.asarray(np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)[0], dtype=np.float64)
            left = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and left < least - 1e-12:
                best, least = np.zeros(count), left
                best[chosen] = found / scale[chosen]
    return best


@dataclass(frozen=True, slots=True)
class Laws:
    """All fitted cost models of a profile.

    Attributes:
        by_key: cost model by (op, dtype, group, stride, ranks).
        counts: measured numbers of active ranks.
    """

    by_key: Mapping[tuple[str, str, int, int, int], Law]
    counts: tuple[int, ...]
    profile: Profile

    @classmethod
    def of(cls, profile: Profile) -> Laws:
        """Fit the cost models of a profile.

        Raises:
            ConfigError: for a profile without compute measurements.
        """
        found: defaultdict[tuple[str, str, int, int, int], list[Measurement]] = defaultdict(list)
        for sample in profile.samples:
            found[sample.op, sample.dtype, sample.group, sample.stride, sample.ranks].append(sample)
        laws = {key: fit_law(key[0], samples) for key, samples in found.items()}
        counts = tuple(sorted({key[4] for key in laws if key[0] == "linear_f"}))
        if not counts:
            rule = "it has no measured matrix products"
            raise ConfigError([Problem("profile", f"profile={profile.path}: {rule}. Create it again: weft calibrate")])
        return cls(laws, counts, profile)

    def seconds(self, op: str, *size: Any, active: Any, dtype: str = "fp32") -> Array:
        """Return the time (s) of a compute call that `active` ranks make at the same time.

        Values between measured numbers of ranks are interpolated linearly. Beyond the largest number, ranks share its
        throughput.

        Args:
            op: a measured operation.
            *size: numbers or arrays, as the cost model of the operation expects them.
            active: number of active ranks.
            dtype: number format; some operations have only fp32.

        Raises:
            ConfigError: for a number format that was not measured with this number of ranks, if fp32 was.
        """
        active = np.asarray(active, dtype=np.float64)
        dtype = "fp32" if op in _ALWAYS_FP32 else dtype
        counts = [count for count in self.counts if (op, dtype, 1, 1, count) in self.by_key]
        if not counts or active.max(initial=1.0) > counts[-1] < self.counts[-1]:
            raise self._not_measured(op, dtype, counts, active)
        each = [self.by_key[op, dtype, 1, 1, count].seconds(*size) for count in counts]
        return _between(counts, each, active)

    def _not_measured(self, op: str, dtype: str, counts: Sequence[int], active: Array) -> ConfigError:
        """Return an error that names the missing measurement and how to make it."""
        most = math.ceil(active.max(initial=1.0))
        here = min((count for count in self.counts if count >= most), default=self.counts[-1])
        only = f" (only with {', '.join(map(str, counts))})" if counts else ""
        rule = f"{op} in {dtype} is not measured with {counted(here, 'rank')} at work{only}"
        remedy = "Measure it, with more time: weft calibrate --budget 5m"
        return ConfigError([Problem("profile", f"profile={self.profile.path}: {rule}. {remedy}")])

    def transfer_s(self, op: str, num_bytes: Any, *, group: int, active: int, stride: int = 1) -> Array:
        """Return the time (s) of a collective over `group` ranks while `active` ranks in total run collectives.

        For an unmeasured group or number of active ranks, the nearest measurement is used, scaled up in proportion to
        its ranks.

        Args:
            op: name of the collective.
            num_bytes: bytes of its buffer.
            group: ranks of one group; 1 takes no time.
            active: ranks of all active groups.
            stride: ranks from one member of a group to the next.

        Raises:
            ConfigError: if no communication between ranks was measured.
        """
        if group <= 1:
            return np.zeros_like(np.asarray(num_bytes, dtype=np.float64))
        near = self._nearest(op, group, active, stride)
        if near is None:
            rule = f"it holds no {op} between ranks"
            raise ConfigError([Problem("profile", f"profile={self.profile.path}: {rule}. Measure with --ranks 1,2,4")])
        return self.by_key[near].seconds(num_bytes) * max(1.0, active / near[4]) * max(1.0, group / near[2])

    def waiting(self, compute_s: Any, *, group: int, active: int) -> Array:
        """Return the time (s) that `group` ranks wait for each other at a synchronization after some compute.

        The time of a collective after one matmul is not included. The result is 0 if this was not measured, as in older
        profiles. Unmeasured groups are handled as in `transfer_s`, which underestimates the time if ranks then share
        cores.

        Args:
            compute_s: compute time (s) since the last synchronization.
            group: ranks of one group.
            active: ranks of all active groups.
        """
        compute_s = np.asarray(compute_s, dtype=np.float64)
        near = self._nearest("meeting", group, active, 1) if group > 1 else None
        if near is None:
            return np.zeros_like(compute_s)
        law, product = self.by_key[near], float(self.seconds("linear_f", *BETWEEN, active=near[4]))
        waited = np.maximum(0.0, law.seconds(compute_s / product) - law.seconds(1.0))
        return waited * max(1.0, active / near[4]) * max(1.0, group / near[2])

    def _nearest(self, op: str, group: int, active: int, stride: int) -> tuple[str, str, int, int, int] | None:
        keys = [key for key in self.by_key if key[0] == op and key[1] == "fp32" and key[2] > 1]
        return min(
            keys,
            key=lambda key: (abs(np.log2(key[2] / group)), abs(np.log2(key[4] / active)), abs(key[3] - stride)),
            default=None,
        )


def _between(counts: Sequence[int], each: Sequence[Array], active: Array) -> Array:
    """Interpolate the values `each` at `counts` to `active`."""
    shape = np.broadcast_shapes(*(one.shape for one in each), active.shape)
    values: Array = np.stack([np.broadcast_to(one, shape) for one in each])
    active = np.broadcast_to(active, shape)
    result = np.asarray(values[-1] * np.maximum(1.0, active / counts[-1]), dtype=np.float64)
    for place in range(len(counts) - 1, 0, -1):
        low, high = counts[place - 1], counts[place]
        share = np.clip((active - low) / (high - low), 0.0, 1.0)
        result = np.where(active <= high, values[place - 1] * (1 - share) + values[place] * share, result)
    return result


# Corrections from runs: for each part of a step, the ratio of measured to predicted time, shrunk towards 1.

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
    """Return the time (s) of a step by part, from its time by term."""
    found = {name: sum(terms.get(term, 0.0) for term in inside) for name, inside in PARTS.items()}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


def part_of_kind(kind: str) -> str:
    """Return the part of a step to which a kind of time in a run's profile belongs.

    Communication over joined axes belongs to the part that matches the purpose of the group.
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
    """Return the ratio of measured to predicted time for each significant part of one step that has both."""
    whole = sum(measured.values())
    found: list[tuple[str, float]] = []
    for name in PARTS:
        mine, theirs = predicted.get(name, 0.0), measured.get(name, 0.0)
        if name in _FOLLOWS or mine <= 0 or theirs < _LEAST_SHARE * whole:
            continue
        found.append((name, round(min(_MOST, max(1 / _MOST, theirs / mine)), 4)))
    return tuple(found)


def part_factors(lessons: Sequence[Lesson]) -> dict[str, float]:
    """Return the correction factor of each part that was corrected by runs."""
    logs: dict[str, list[float]] = {}
    for lesson in lessons:
        for name, ratio in lesson.ratios:
            logs.setdefault(name, []).append(math.log(ratio))
    return {name: math.exp(sum(each) / (len(each) + _DOUBT)) for name, each in logs.items()}


def factors(profile: Profile) -> dict[str, float]:
    """Return the correction factor of each term."""
    found = part_factors(profile.learned)
    return {term: found[part] for part, inside in PARTS.items() if part in found for term in inside}


def lesson_words(profile: Profile) -> str:
    """Return 'compute x 1.08, over tp x 0.93 (learned from 2 runs)', or "" without corrections."""
    found = part_factors(profile.learned)
    if not found:
        return ""
    runs = len(profile.learned)
    told = ", ".join(f"{name} x {value:.2f}" for name, value in found.items())
    return f"{told} (learned from {counted(runs, 'run')})"


def lesson_of(run: Path) -> Lesson:
    """Return the corrections from a finished run.

    Raises:
        ConfigError: for a folder without `measured.json`, or a run without an estimate.
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
        ConfigError: for a run on another kind of device, or one without estimate and measured times.
    """
    lesson = lesson_of(run)
    kind = json.loads((run / RUN_FILE).read_text(encoding="utf-8"))["device"]
    if kind != profile.machine.kind:
        rule = f"it ran on {kind}, and the profile is of {profile.machine.kind}"
        raise _error(f"learn={run}: {rule}. Give a run of this machine.")
    return profile.with_lesson(lesson)


def _error(message: str) -> ConfigError:
    return ConfigError([Problem("learn", message)])
