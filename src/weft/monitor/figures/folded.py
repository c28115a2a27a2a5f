"""The same figure of many ranks as five numbers: least, median, greatest, and whose the two ends are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fold:
    """One figure over ranks or machines. at_min, at_max: who has the two ends, such as "rank 3"."""

    min: float
    median: float
    max: float
    at_min: str
    at_max: str

    def as_json(self) -> list[object]:
        """Return it as an event holds it: [least, median, greatest, who has the least, who has the greatest]."""
        return [*(_short(value) for value in (self.min, self.median, self.max)), self.at_min, self.at_max]


def fold(values: Mapping[str, float]) -> Fold | None:
    """Return a figure's values by owner as one `Fold`; None where none is a number. Of equals the first is named."""
    known = {owner: value for owner, value in values.items() if not math.isnan(value)}
    if not known:
        return None
    low = min(known, key=lambda owner: known[owner])
    high = max(known, key=lambda owner: known[owner])
    return Fold(known[low], statistics.median(known.values()), known[high], low, high)


def _short(value: float) -> float | int:
    """Six digits say enough, and whole numbers stay whole: a line of an event is read by people too."""
    if not math.isfinite(value):
        return value
    return int(value) if value == int(value) and abs(value) < 2**53 else float(f"{value:.6g}")
