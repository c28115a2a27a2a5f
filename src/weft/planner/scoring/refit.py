"""What is fitted, refitted without a source or a kind of runs: how far off the planner is where it has not been.

Each term of a step has a factor, and so have makes of devices, narrow formats, experts and software; all start at 1,
which is what is shipped, and are drawn back to it. A factor moves as far as the runs that are left in say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.planner.cost import TERMS
from weft.planner.scoring.families import FAMILIES, circumstances, families
from weft.planner.scoring.prediction import Prediction

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Standard deviations of the logarithms of factors, before any run is seen: of terms, and of the others.
_TERM_SD, _MAKE_SD, _STACK_SD = 0.075, 0.04, 0.03
#: Error of one run, as a logarithm; what is further off counts less.
_NOISE, _ROBUST = 0.1, 0.15
#: A source counts as this many configurations at most.
_SOURCE_RUNS = 6.0
_STEPS = 8
#: Of what a factor knows, a source that gives less than this share does not determine it.
_WORTH = 0.05


@dataclass(frozen=True, slots=True)
class Factor:
    """One fitted number: its value with all sources, and the sources that determine it, by their share of what is
    known of it, largest first; `prior`: the share of the value that it starts with."""

    name: str
    value: float
    sources: tuple[tuple[str, float], ...]
    prior: float


@dataclass(frozen=True, slots=True)
class Refit:
    """Predicted seconds by id of a run. seen: with all sources. source_out: without the run's source. family_out: by
    kind, without all runs of that kind."""

    seen: dict[str, float]
    source_out: dict[str, float]
    family_out: dict[str, dict[str, float]]
    factors: tuple[Factor, ...]


def refit(predictions: Sequence[Prediction]) -> Refit:
    """Fit the factors to the runs with measured times: to all, and to all but each source and each kind.

    Args:
        predictions: of runs that score; one of each run.
    """
    measured = [each for each in predictions if each.run.measured_s]
    if not measured:
        return Refit({}, {}, {}, ())
    data = _Data.of(measured)
    names = [each.run.id for each in measured]
    everything = np.ones(len(measured), dtype=np.bool_)
    all_in = data.fit(everything)
    without: Array = np.zeros(len(measured))
    for source in sorted(set(data.sources)):
        here = np.array([each == source for each in data.sources])
        without[here] = data.predicted(data.fit(~here))[here]
    out: dict[str, dict[str, float]] = {}
    for family in FAMILIES:
        here = np.array([family in families(each.run) for each in measured])
        if here.any() and not here.all():
            times = np.exp(data.predicted(data.fit(~here)))
            out[family] = {name: float(times[row]) for row, name in enumerate(names) if here[row]}
    return Refit(
        seen=dict(zip(names, np.exp(data.predicted(all_in)).tolist(), strict=True)),
        source_out=dict(zip(names, np.exp(without).tolist(), strict=True)),
        family_out=out,
        factors=data.factors(all_in),
    )


@dataclass(frozen=True, slots=True)
class _Data:
    """seconds: by run and term. marks: 1 where a factor of a make, a format or software speaks of a run."""

    sources: list[str]
    groups: list[tuple[str, str]]
    measured: Array
    seconds: Array
    marks: Array
    names: list[str]
    sds: Array

    @classmethod
    def of(cls, runs: Sequence[Prediction]) -> _Data:
        facts = [circumstances(each.run) for each in runs]
        marks: dict[str, tuple[list[float], float]] = {}

        def mark(name: str, holds: Callable[[int], bool], sd: float) -> None:
            column = [float(holds(row)) for row in range(len(runs))]
            if any(column) and not all(column):
                marks[name] = (column, sd)

        for make in sorted({one.generation for one in facts}):
            mark(f"device {make or 'other'}", lambda row, make=make: facts[row].generation == make, _MAKE_SD)
        mark("experts", lambda row: facts[row].experts, _MAKE_SD)
        mark("fp8", lambda row: runs[row].run.precision == "fp8", _MAKE_SD)
        mark("fp4", lambda row: runs[row].run.precision == "fp4", _MAKE_SD)
        for stack in sorted({each.run.job.stack.name for each in runs}):
            mark(f"software {stack}", lambda row, stack=stack: runs[row].run.job.stack.name == stack, _STACK_SD)
        columns = [column for column, _ in marks.values()]
        return cls(
            sources=[each.run.source for each in runs],
            groups=[(each.run.source, each.run.group) for each in runs],
            measured=np.log([each.run.measured_s or 1.0 for each in runs]),
            seconds=np.array([[each.terms.get(term, 0.0) for term in TERMS] for each in runs]),
            marks=np.array(columns).T if columns else np.zeros((len(runs), 0)),
            names=[*TERMS, *marks],
            sds=np.array([_TERM_SD] * len(TERMS) + [sd for _, sd in marks.values()]),
        )

    def predicted(self, logs: Array) -> Array:
        """Logarithms of the seconds of each run, with the logarithms of the factors."""
        terms = len(TERMS)
        return np.log(self.seconds @ np.exp(logs[:terms])) + self.marks @ logs[terms:]

    def _weights(self, rows: Mask) -> Array:
        """A configuration counts once, however often it was measured, and a source for _SOURCE_RUNS at most."""
        repeats = Counter(group for group, row in zip(self.groups, rows, strict=True) if row)
        sizes = Counter(source for source, _ in repeats)
        weights = [
            min(1.0, _SOURCE_RUNS / sizes[source]) / repeats[source, group] if row else 0.0
            for (source, group), row in zip(self.groups, rows, strict=True)
        ]
        return np.array(weights)

    def _slopes(self, logs: Array) -> Array:
        scaled = self.seconds * np.exp(logs[: len(TERMS)])
        return np.concatenate([scaled / scaled.sum(axis=1, keepdims=True), self.marks], axis=1)

    def fit(self, rows: Mask) -> Array:
        """Gauss-Newton steps with a loss that grows with the error, not with its square, where that is large."""
        logs = np.zeros(len(self.names))
        base = self._weights(rows)
        for _ in range(_STEPS):
            slopes, error = self._slopes(logs), self.measured - self.predicted(logs)
            weights = base / np.maximum(1.0, np.abs(error) / _ROBUST)
            left = slopes.T @ (slopes * weights[:, None]) / _NOISE**2 + np.diag(1 / self.sds**2)
            right = slopes.T @ (weights * error) / _NOISE**2 - logs / self.sds**2
            logs = logs + np.clip(np.linalg.solve(left, right), -0.3, 0.3)
        return logs

    def factors(self, logs: Array) -> tuple[Factor, ...]:
        """Every factor, and whose runs determine it: by each source's part of the information on it."""
        slopes = self._slopes(logs)
        weights = self._weights(np.ones(len(self.sources), dtype=np.bool_))
        known = slopes**2 * weights[:, None] / _NOISE**2
        found: list[Factor] = []
        for column, name in enumerate(self.names):
            by_source: Counter[str] = Counter()
            for source, part in zip(self.sources, known[:, column].tolist(), strict=True):
                by_source[source] += part
            prior = 1 / float(self.sds[column]) ** 2
            whole = prior + sum(by_source.values())
            shares = [(source, part / whole) for source, part in by_source.most_common() if part >= _WORTH * whole]
            found.append(Factor(name, float(np.exp(logs[column])), tuple(shares), prior / whole))
        return tuple(found)
