"""What a figure is: a number that a run or its machines are measured by, with name, unit, help and label."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: Whose number it is. run: one for all ranks. rank: each rank has one. host: each machine has one.
Owner = Literal["run", "rank", "host"]

_SERIES = re.compile(r"([a-z][a-z0-9_]*(?:\.[a-z][a-z0-9_]*)*)(?:\{([^{}]*)\})?")
_PLAIN = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One kind of number.

    name: dotted, as conditions and events write it. unit: "s", "bytes", "ratio", ... or "" for a plain number. label:
    what tells its series apart, such as "phase"; "" where there is one series. owner: whose number it is. grows: it
    is a total that only rises while the run lasts. worse: which way trouble lies, "" where neither is.
    """

    name: str
    unit: str
    help: str
    label: str = ""
    owner: Owner = "run"
    grows: bool = False
    worse: Literal["high", "low", ""] = ""

    @property
    def exported(self) -> str:
        """Its name for Prometheus and OpenTelemetry: one prefix, base units, "_total" for what grows."""
        unit = {"bytes/s": "bytes_per_second", "s": "seconds", "W": "watts", "C": "celsius", "Hz": "hertz"}
        words = [_PLAIN.sub("_", self.name.removesuffix("_s") if self.unit == "s" else self.name)]
        suffix = unit.get(self.unit, self.unit if self.unit in ("bytes", "ratio") else "")
        stem = words[0]
        for ending in ("_bytes_per_s", "_bytes", "_per_s"):
            if suffix.startswith("bytes") and stem.endswith(ending):
                stem = stem.removesuffix(ending)
        if stem.endswith("_per_s"):
            stem = f"{stem.removesuffix('_per_s')}_per_second"
        parts = ["weft", stem, *([suffix] if suffix and not stem.endswith(suffix) else [])]
        return "_".join([*parts, *(["total"] if self.grows else [])])


def series(name: str, label: str = "") -> str:
    """Return the text that names one series: "step_s" or "phase_s{forward}"."""
    return f"{name}{{{label}}}" if label else name


def split_series(text: str) -> tuple[str, str]:
    """Return (name, label) of a series' text; the label is "" where it has none.

    Raises:
        ValueError: where it is neither `name` nor `name{label}`.
    """
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} names no figure. Write a name such as loss, or phase_s{{forward}}")
    return match[1], match[2] or ""
