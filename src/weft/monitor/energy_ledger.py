"""Energy of a run by cause: its readings, attributed to the same causes as the time between them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.config.energy import J_PER_KWH, EnergyPrice, carbon_intensity
from weft.monitor.events import number
from weft.units import counted, format_count

PRODUCTIVE, LOST = "productive", "lost work"
#: Cause of time in which the run has released its devices, so that their energy is not the run's.
_RELEASED = "held"
#: Maximum number of spans without a reading between them. Older ones count as unmeasured.
_MOST_PENDING = 1_000_000


@dataclass(slots=True)
class _Span:
    """Seconds of one cause, or of one step (`step` >= 0), of which `data_s` are its wait for data."""

    cause: str
    seconds: float
    step: int = -1
    data_s: float = 0.0


@dataclass(slots=True)
class _Curve:
    """A cumulative reading in joules, and the time since its last value."""

    joules: float = math.nan
    estimated_j: float = 0.0
    spans: list[_Span] = field(default_factory=list[_Span])


class EnergyLedger:
    """Attributes energy to causes. `TimeLedger` reports each span of time, and events report the readings.

    Between two readings, each span gets energy in proportion to its seconds. The machine of rank 0 and the others are
    separate curves, since the readings of the others arrive less often. Time after the last reading of a start, and
    starts without a meter, are unmeasured.

    Attributes:
        estimated_j: estimated part of all joules so far.
        unmeasured_s: seconds without a reading, by cause.
        devices: name, label and basis of the devices of rank 0's machine in the last start.
        num_hosts: number of machines of the last start.
        others: metered machines, and devices without a meter, of all machines except rank 0's.
        num_items: items (such as tokens) of the steps that were measured and not lost.
    """

    def __init__(self) -> None:
        self.estimated_j = self.num_items = 0.0
        self.unmeasured_s: dict[str, float] = {}
        self.devices: list[dict[str, str]] = []
        self.num_hosts, self.others = 1, (0, 0)
        self._joules: dict[str, float] = {}
        self._curves: dict[str, _Curve] = {}
        self._pending: list[_Span] = []
        self._offset, self._num_steps = -1, 0  # steps before the first measured one, and all
        self._step_j, self._data_j, self._items = array("d"), array("d"), array("d")
        self._first_steps: list[int] = []

    @property
    def is_measured(self) -> bool:
        """True if there has been a reading."""
        return self._offset >= 0

    def begin(self) -> None:
        """Note a start: time since the last reading of the previous one is unmeasured."""
        if "local" in self._curves:
            self._leave_out(self._curves["local"].spans)
        self._curves, self.devices, self.num_hosts, self.others = {}, [], 1, (0, 0)

    def spend(self, cause: str, seconds: float) -> None:
        """Add seconds of a cause. Negative seconds correct an earlier call."""
        if cause == _RELEASED:
            return
        if self._curves:
            self._add(_Span(cause, seconds))
        elif self.is_measured:
            self.unmeasured_s[cause] = self.unmeasured_s.get(cause, 0.0) + seconds

    def add_step(self, work_s: float, data_s: float, event: Mapping[str, Any], *, is_first: bool) -> None:
        """Add a step that counts, with its event. is_first: whether it is the first of a start."""
        self._num_steps += 1
        if is_first:
            self._first_steps.append(self._num_steps - 1 if self._curves else -1)
        if not self.is_measured:
            return
        step = self._num_steps - 1 - self._offset
        self._step_j.append(0.0)
        self._data_j.append(0.0)
        self._items.append(_items_of(event) if self._curves else 0.0)
        self.num_items += self._items[-1]
        if self._curves:
            self._add(_Span(PRODUCTIVE, work_s + data_s, step, data_s))
        else:
            self.unmeasured_s[PRODUCTIVE] = self.unmeasured_s.get(PRODUCTIVE, 0.0) + work_s + data_s

    def add_skipped_step(self, seconds: float, *, is_first: bool) -> None:
        """Add a step that did not change the weights."""
        if is_first:
            self._first_steps.append(-1)
        self.spend(LOST, seconds)

    def _add(self, span: _Span) -> None:
        for name, curve in self._curves.items():
            curve.spans.append(span)
            if len(curve.spans) > _MOST_PENDING:
                if name == "local":
                    self._leave_out(curve.spans[: _MOST_PENDING // 2])
                del curve.spans[: _MOST_PENDING // 2]

    def forget_beyond(self, num_steps: int) -> None:
        """Attribute the energy of all steps after the first `num_steps` to lost work."""
        if num_steps >= self._num_steps:
            return
        self._num_steps = num_steps
        self._first_steps = [one if one < num_steps else -1 for one in self._first_steps]
        if not self.is_measured:
            return
        kept = max(0, num_steps - self._offset)
        for curve in self._curves.values():
            for span in curve.spans:
                if span.step >= kept:
                    span.cause, span.step = LOST, -1
        while len(self._step_j) > kept:
            self._data_j.pop()
            self.num_items -= self._items.pop()
            self._joules[LOST] = self._joules.get(LOST, 0.0) + self._step_j.pop()
        self._offset = min(self._offset, num_steps)

    def feed(self, event: Mapping[str, Any]) -> None:
        """Add a reading: an "energy" event, or the energy of other machines in a "figures" event."""
        if event.get("event") == "figures":
            counts = event.get("energy_others")
            if isinstance(counts, list) and len(counts) == 2 and all(type(one) is int for one in counts):
                self.others = counts[0], counts[1]
            if "others" in self._curves and math.isfinite(number(event.get("energy_others_j"))):
                self._read("others", number(event["energy_others_j"]), number(event.get("estimated_others_j")))
            return
        listed = event.get("devices")
        if isinstance(listed, list):
            self.devices = [_texts(one) for one in listed[:1000] if isinstance(one, Mapping)]
            hosts = event.get("num_hosts")
            self.num_hosts = hosts if type(hosts) is int and hosts > 0 else 1
        joules = number(event.get("energy_j"))
        if not math.isfinite(joules):
            return
        if not self.is_measured:
            self._offset = self._num_steps
        if self.num_hosts > 1 and "local" not in self._curves:
            self._curves["others"] = _Curve(0.0)
        self._read("local", joules, number(event.get("estimated_j")))

    @property
    def notes(self) -> list[str]:
        """Devices that are estimated or unmeasured, with the formula or the reason."""
        found = [f"{one['name']}: {one['basis']}" for one in self.devices if one["label"] != "measured"]
        metered, missing = self.others
        if (silent := self.num_hosts - 1 - metered) > 0:
            found.append(f"{counted(silent, 'other machine')}: no reading (they report every monitor.every)")
        if missing:
            found.append(f"other machines: {counted(missing, 'device')} unmeasured (weft energy meters, on each)")
        return found

    def _read(self, name: str, joules: float, estimated_j: float) -> None:
        curve = self._curves.setdefault(name, _Curve())
        grown = joules - curve.joules
        if math.isfinite(grown) and grown >= 0:
            self._distribute(curve.spans, grown)
            if math.isfinite(estimated_j):
                self.estimated_j += max(0.0, estimated_j - curve.estimated_j)
        elif name == "local":
            self._leave_out(curve.spans)
        curve.spans = []
        curve.joules, curve.estimated_j = joules, estimated_j if math.isfinite(estimated_j) else 0.0

    def _distribute(self, spans: Iterable[_Span], joules: float) -> None:
        spans = list(spans)
        seconds = sum(span.seconds for span in spans)
        if seconds <= 0:
            self._joules["other"] = self._joules.get("other", 0.0) + joules
            return
        for span in spans:
            part = joules * span.seconds / seconds
            if span.step >= 0:
                self._step_j[span.step] += part
                self._data_j[span.step] += part * span.data_s / span.seconds if span.seconds > 0 else 0.0
            else:
                self._joules[span.cause] = self._joules.get(span.cause, 0.0) + part

    def _leave_out(self, spans: Iterable[_Span]) -> None:
        for span in spans:
            self.unmeasured_s[span.cause] = self.unmeasured_s.get(span.cause, 0.0) + span.seconds

    @property
    def total_j(self) -> float:
        """All joules of the run that were measured or estimated."""
        return sum(self._joules.values()) + sum(self._step_j)

    def joules(self, first_steps: Iterable[tuple[str, float]] = ()) -> dict[str, float]:
        """Return the joules by cause.

        first_steps: for each start with a step, the cause and the share (0 to 1) of its first step that is not
            productive.
        """
        data = sum(self._data_j)
        found = dict(self._joules)
        found[PRODUCTIVE] = found.get(PRODUCTIVE, 0.0) + sum(self._step_j) - data
        found["data"] = found.get("data", 0.0) + data
        # As in the time ledger: a wait for a save that is not in a gap between steps happened inside a step.
        if (other := found.get("other", 0.0)) < 0:
            found[PRODUCTIVE], found["other"] = found[PRODUCTIVE] + other, 0.0
        for (cause, share), step in zip(first_steps, self._first_steps, strict=False):
            if step >= self._offset >= 0:
                at = step - self._offset
                part = share * (self._step_j[at] - self._data_j[at])
                found[PRODUCTIVE] -= part
                found[cause] = found.get(cause, 0.0) + part
        return {cause: joules for cause, joules in found.items() if abs(joules) > 1e-9}


def _items_of(step: Mapping[str, Any]) -> float:
    """Return the number of items, such as tokens, of a step event."""
    names = (key.removesuffix("_per_s") for key in step if key.endswith("_per_s") and key != "samples_per_s")
    found = number(step.get(next(names, "samples"), 0.0))
    return found if math.isfinite(found) and found > 0 else 0.0


def _texts(table: Mapping[Any, Any]) -> dict[str, str]:
    return {key: str(table.get(key, ""))[:500] for key in ("name", "label", "basis")}


# The summary of a run, for all displays.


@dataclass(frozen=True, slots=True)
class EnergySummary:
    """Energy, cost and CO2 of a run.

    Attributes:
        kwh: energy at the building's meter, or None if nothing was measured or estimated.
        label: "measured", "estimated", "12 % estimated" or "unmeasured".
        shares: share of the energy by cause.
        j_per_item: joules, with PUE, per item of the steps that count, or None.
        unmeasured_s: seconds of the run without a reading.
        notes: devices without a meter, and formulas of estimates.
    """

    kwh: float | None
    label: str
    shares: Mapping[str, float]
    pue: float = 1.0
    j_per_item: float | None = None
    cost: float | None = None
    currency: str = ""
    co2_g: float | None = None
    unmeasured_s: float = 0.0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, ledger: EnergyLedger, joules: Mapping[str, float], config: object) -> EnergySummary:
        """Return the summary of a ledger.

        Args:
            ledger: the ledger.
            joules: joules by cause.
            config: the run's config as in its "start" event. Invalid values count as not set.
        """
        section = config.get("energy") if isinstance(config, Mapping) else None
        settings: Mapping[str, Any] = section if isinstance(section, Mapping) else {}
        notes = tuple(ledger.notes)
        unmeasured_s = sum(ledger.unmeasured_s.values())
        total = sum(joules.values())
        if not ledger.is_measured or total <= 0:
            notes += ("the counters have not advanced",) if ledger.is_measured and total <= 0 else ()
            return cls(None, "unmeasured", {}, unmeasured_s=unmeasured_s, notes=notes)
        pue = number(settings.get("pue", 1.0))
        pue = pue if 1 <= pue <= 10 else 1.0
        kwh = total * pue / J_PER_KWH
        price = _parsed(EnergyPrice.parse, settings.get("price"))
        grid = _parsed(carbon_intensity, settings.get("grid"))
        part = ledger.estimated_j / total
        label = "measured" if part < 0.005 else "estimated" if part > 0.995 else f"{part:.0%} estimated"
        return cls(
            kwh=kwh,
            label=label,
            shares={cause: one / total for cause, one in joules.items()},
            pue=pue,
            j_per_item=total * pue / ledger.num_items if ledger.num_items > 0 else None,
            cost=None if price is None else price.per_kwh * kwh,
            currency="" if price is None else price.currency,
            co2_g=None if grid is None else grid * kwh,
            unmeasured_s=unmeasured_s,
            notes=notes,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values for JSON, with kWh by cause. Unknown values are None."""
        found: dict[str, Any] = {"kwh": _short(self.kwh), "label": self.label, "pue": self.pue}
        found["kwh_by_cause"] = {cause: _short((self.kwh or 0.0) * share) for cause, share in self.shares.items()}
        found |= {"j_per_item": _short(self.j_per_item), "cost": _short(self.cost), "currency": self.currency or None}
        return found | {
            "co2_g": _short(self.co2_g),
            "unmeasured_s": round(self.unmeasured_s, 3),
            "notes": list(self.notes),
        }

    def text(self, unit: str) -> str:
        """Return the figures on one line. unit: the run's items, such as "tokens"."""
        if self.kwh is None:
            return "unmeasured"
        item = unit.removesuffix("s")
        each = "" if self.j_per_item is None else f", {self.j_per_item:.3g} J per {item}"
        cost = "" if self.cost is None else f", {_amount(self.cost)} {self.currency}"
        co2 = "" if self.co2_g is None else f", {format_co2(self.co2_g)}"
        return f"{format_energy(self.kwh)} ({self.label}){each}{cost}{co2}"

    def share_text(self) -> str:
        """Return the causes by share, such as "92.1% productive, 4.0% evaluation"."""
        order = sorted(self.shares.items(), key=lambda one: -one[1])
        return ", ".join(f"{share:.1%} {cause}" for cause, share in order if share >= 0.0005)

    def lines(self, unit: str, *, with_causes: bool = True) -> list[str]:
        """Return a report: figures, causes, and devices and times that are estimated or unmeasured."""
        if self.kwh is None:
            return [f"energy  unmeasured{'' if not self.notes else ': '}{'; '.join(self.notes)}"]
        found = [f"energy  {self.text(unit)}"]
        if with_causes:
            found.append(f"        {self.share_text()}")
        if self.unmeasured_s >= 1:
            found.append(f"        unmeasured for {self.unmeasured_s:.0f} s of the run")
        return found + [f"        {note}" for note in self.notes]


def _parsed(parse: Any, text: object) -> Any:
    try:
        return None if text is None else parse(str(text))
    except ValueError:
        return None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _amount(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def format_energy(kwh: float) -> str:
    """Return an energy as text, such as "1.23 kWh" or "45.6 Wh"."""
    for unit, size in (("GWh", 1e6), ("MWh", 1e3), ("kWh", 1.0), ("Wh", 1e-3)):
        if kwh >= size:
            return f"{kwh / size:.3g} {unit}"
    return f"{kwh * 1e6:.3g} mWh"


def format_co2(grams: float) -> str:
    """Return a mass of CO2 as text, such as "1.2 kg CO2"."""
    if grams >= 1e6:
        return f"{format_count(grams / 1e6)} t CO2"
    return f"{grams / 1e3:.3g} kg CO2" if grams >= 1e3 else f"{grams:.3g} g CO2"
