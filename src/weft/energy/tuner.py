"""Tuning of a limit on the live steps of a run: tries in turn, the choice, and its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.energy.guard import Guarded
from weft.energy.limits import DeviceLimit
from weft.energy.search import LimitSearch, Try

#: Least saving of energy for which another value than the present one is chosen.
_WORTH = 0.01


@dataclass(frozen=True, slots=True)
class ChosenLimit:
    """Result of a tuning.

    Attributes:
        value: the chosen value; the present one if no other saves at least 1 %.
        present: the value before and after the tuning.
        time, energy: step time and energy per step of the chosen value, relative to the present one.
        tries: all measurements in order.
    """

    value: int
    present: int
    time: float
    energy: float
    tries: tuple[Try, ...]


def tune(
    limit: DeviceLimit,
    guarded: Guarded,
    measure: Callable[[int], Try],
    search: LimitSearch,
    report: Callable[[int, Try], None],
) -> ChosenLimit:
    """Try values of a limit and return the choice. The limit is restored by `guarded`, whose block must be entered.

    Args:
        limit: the limit.
        guarded: restores the limit whatever ends this process.
        measure: measures steps under a value that has been set.
        search: chooses the values.
        report: called with the number of the try and its result.

    Raises:
        NoRights: if a value may not be set.
        OSError: if a device refuses a value.
    """
    while (value := search.next_value()) is not None:
        guarded.check()
        limit.set(value)
        found = measure(value)
        search.add(found)
        report(len(search.tries), found)
    return choice(search)


def choice(search: LimitSearch) -> ChosenLimit:
    """Return the choice after the last try."""
    time, energy = search.predicted()
    value = search.best()
    at = search.values.index(value)
    if energy[at] > 1 - _WORTH:
        return ChosenLimit(search.baseline, search.baseline, 1.0, 1.0, tuple(search.tries))
    return ChosenLimit(value, search.baseline, float(time[at]), float(energy[at]), tuple(search.tries))
