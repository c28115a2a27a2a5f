"""The search for the power limit or clock with the least energy per step within a slowdown, from few noisy tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Tries after which the unchanged setting is tried again, to remove drift.
_BASELINES = (0, 5, 9)
#: Relative difference of energy that counts as equal while searching. Lower values are then tried first.
_TIE = 0.003


@dataclass(frozen=True, slots=True)
class Try:
    """Measurement of one value: mean seconds and joules of a step."""

    value: int
    step_s: float
    joules: float


class LimitSearch:
    """Chooses the values to try, in turn and repeatedly, and the best value.

    A higher value never makes a step slower, and never lowers the power. Tries are compared with the nearest tries of
    the unchanged setting before and after them, so that slow drift of the machine does not count. Between tried values,
    time and power are interpolated.

    Args:
        values: possible values in ascending order; the last one is the unchanged setting.
        max_slowdown: largest permitted increase of the step time, such as 0.05.
        num_tries: number of tries.

    Raises:
        ValueError: for less than two values, or values in another order.
    """

    def __init__(self, values: Sequence[int], max_slowdown: float, num_tries: int = 12):
        if len(values) < 2 or sorted(set(values)) != list(values):
            raise ValueError("at least two values are needed, in ascending order")
        self.values, self.max_slowdown, self.num_tries = tuple(values), max_slowdown, num_tries
        self.tries: list[Try] = []

    @property
    def baseline(self) -> int:
        """The unchanged setting."""
        return self.values[-1]

    def add(self, tried: Try) -> None:
        """Add a measurement."""
        self.tries.append(tried)

    def next_value(self) -> int | None:
        """Return the value to try next, or None after the last try."""
        done, count = len(self.tries), len(self.values)
        if done >= self.num_tries:
            return None
        if done in _BASELINES:
            return self.baseline
        first = (self.values[count // 2], self.values[count // 4], self.values[(3 * count) // 4])
        tried = [one.value for one in self.tries]
        for value in first[: 2 if count < 6 else 3]:
            if value not in tried:
                return value
        return self._near(self._best(_TIE), tried)

    def _near(self, best: int, tried: Sequence[int]) -> int:
        """Return the middle of a gap between tried values around the best one, or a value there to repeat."""
        known = self.relative()
        lower = max((value for value in known if value < best), default=self.values[0] - 1)
        upper = min((value for value in known if value > best), default=self.baseline)
        inner = best if best in known else lower
        gaps = [[value for value in self.values if low < value < high] for low, high in ((lower, best), (best, upper))]
        if best not in known:
            gaps = [[value for value in self.values if lower < value < upper]]
        elif lower in known and known[lower][0] > 1.0 + self.max_slowdown:  # the slowdown's limit is in the lower gap
            gaps = [gaps[0] or gaps[1]]
        gap = max(gaps, key=len)
        if gap:
            return gap[len(gap) // 2]
        others = [value for value in (inner, lower, upper) if value in known and value != self.baseline] or [best]
        return min(others, key=tried.count)

    def relative(self) -> dict[int, tuple[float, float]]:
        """Return the mean time and energy of each tried value, relative to the unchanged setting.

        A least-squares fit separates the values from a drift that is linear in the number of the try.
        """
        values = sorted({one.value for one in self.tries})
        design = np.array([[one.value == value for value in values] for one in self.tries], np.float64)
        times = np.arange(len(self.tries)) - (len(self.tries) - 1) / 2
        measured = np.log([[one.step_s, one.joules] for one in self.tries])
        if len(self.tries) > len(values):  # repeated values show the drift
            design = np.column_stack([design, times])
        fitted = np.linalg.lstsq(design, measured, rcond=None)[0][: len(values)]
        fitted = np.exp(fitted - fitted[values.index(self.baseline)])
        return {value: (float(time), float(joules)) for value, (time, joules) in zip(values, fitted, strict=True)}

    def predicted(self) -> tuple[Floats, Floats]:
        """Return time and energy of all `values` relative to the unchanged setting, interpolated between tries."""
        known = self.relative()
        counts = np.array([sum(one.value == value for one in self.tries) for value in known], np.float64)
        time = _monotone(np.log([one[0] for one in known.values()])[::-1], counts[::-1])[::-1]
        power = _monotone(np.log([one[1] / one[0] for one in known.values()]), counts)
        where = np.log(list(known))
        wanted = np.log(self.values)
        # Below the lowest tried value, both are extrapolated from its slope.
        time, power = _extended(wanted, where, time), _extended(wanted, where, power)
        return np.exp(time), np.exp(time + power)

    def best(self) -> int:
        """Return the value with the least predicted energy within the slowdown."""
        return self._best(0.0)

    def _best(self, tie: float) -> int:
        """Return the lowest value whose energy is within a share `tie` of the least one."""
        time, energy = self.predicted()
        allowed = time <= 1.0 + self.max_slowdown
        allowed[-1] = True
        energy = np.where(allowed, energy, np.inf)
        return self.values[int(np.argmax(energy <= energy.min() * (1 + tie)))]


def _extended(wanted: Floats, where: Floats, values: Floats) -> Floats:
    found = np.interp(wanted, where, values)
    if len(where) > 1:
        slope = (values[1] - values[0]) / (where[1] - where[0])
        below = wanted < where[0]
        found[below] = values[0] + slope * (wanted[below] - where[0])
    return found


def _monotone(values: Floats, weights: Floats) -> Floats:
    """Return the nearest non-decreasing sequence, by weighted squares (pool adjacent violators)."""
    pools: list[list[float]] = []  # mean, weight, length
    for value, weight in zip(values, weights, strict=True):
        pools.append([float(value), float(weight), 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, mass, length = pools.pop()
            last = pools[-1]
            last[0] = (last[0] * last[1] + mean * mass) / (last[1] + mass)
            last[1], last[2] = last[1] + mass, last[2] + length
    return np.concatenate([np.full(int(length), mean) for mean, _, length in pools])
