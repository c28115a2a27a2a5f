"""Duration and price of a full training run, with failures, checkpoints, energy and expected loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from weft import units
from weft.config.energy import carbon_intensity, grids
from weft.errors import ConfigError, Problem, did_you_mean
from weft.planner.report.energy_front import SortBy, ranked_by
from weft.planner.report.explanation import band_of
from weft.planner.search.best_plans import answer
from weft.planner.search.candidate import Answer, Candidate
from weft.planner.search.question import Question
from weft.planner.uncertainty import Band

_DAY = 86_400.0
#: Hours between failures of one device: 419 unexpected interruptions in 54 days on 16,384 H100s (Llama 3, arXiv
#: 2407.21783).
_DEVICE_HOURS = 50_700.0
_RESTART_S = 600.0
#: Minimum interval between checkpoints, so that one is on storage before the next. Minimum time that training stops for
#: a checkpoint, since ranks wait for each other.
_LEAST_SAVE_S, _LEAST_STALL_S = 300.0, 1.0
#: Goodput below which a run makes no progress.
_LEAST_GOODPUT = 1e-4
#: Bytes per second from a device to its host if the rate is unknown: achieved rate of PCIe 4.
_COPY_RATE = 20e9
#: Loss of a dense decoder of N parameters after D tokens: E + A / N^a + B / D^b (arXiv 2404.10102, a new fit to the
#: data of arXiv 2203.15556; standard errors: E 0.03, a and b 0.02).
_E, _A, _B, _ALPHA, _BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """Settings of a run. One of tokens, loss and budget (dollars) defines when it ends.

    Attributes:
        device_hours: hours between failures of one device.
        restart_s: time (s) from a failure to the next step.
        save_s: time (s) between checkpoints; None: the best interval.
        stall_s: time (s) that training waits for a checkpoint; None: the time to copy the states to the host.
        grid: grams of CO2 per kWh, or None.
        store_rate: bytes/s that all ranks together write to checkpoint storage; None for no limit.
        price: dollars per device hour, or None.
    """

    tokens: float | None = None
    loss: float | None = None
    budget: float | None = None
    device_hours: float = _DEVICE_HOURS
    restart_s: float = _RESTART_S
    save_s: float | None = None
    stall_s: float | None = None
    grid: float | None = None
    store_rate: float | None = None
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRun:
    """A full training run with one plan.

    Attributes:
        seconds: total duration.
        goodput: share of the time spent on steps that are not lost to failures.
        failure_s: average time (s) between failures of any device.
        save_s, stall_s: as in `RunTerms`, with None replaced.
        write_s: time (s) to write one checkpoint to storage, or None without `store_rate`.
        dollars, kwh: None if price or power are unknown.
        loss: None if the scaling law does not apply.
        band: error band of the step time, or None.
    """

    terms: RunTerms
    candidate: Candidate
    tokens: float
    seconds: float
    goodput: float
    failure_s: float
    save_s: float
    stall_s: float
    write_s: float | None
    dollars: float | None
    kwh: float | None
    loss: float | None
    band: Band | None

    @property
    def days(self) -> float:
        """Days from the first step to the last."""
        return self.seconds / _DAY

    @property
    def co2_kg(self) -> float | None:
        """Kilograms of CO2 for the energy, or None if grid or power are unknown."""
        return None if self.kwh is None or self.terms.grid is None else self.kwh * self.terms.grid / 1e3

    def lines(self) -> list[str]:
        """Return a description of the run as text."""
        job, count = self.candidate.question.job, self.candidate.question.cluster.num_devices
        band = self.band
        words = "" if band is None else f" ({self.days * band.low:.3g} to {self.days * band.high:.3g} in 80% of cases)"
        steps, kwh = math.ceil(self.tokens / job.tokens), self.kwh or 0.0
        unit, size = ("GWh", 1e6) if kwh >= 1e6 else ("MWh", 1e3) if kwh >= 1e3 else ("kWh", 1.0)
        known = [
            *([] if self.dollars is None else [f"${self.dollars:,.0f}"]),
            *([] if self.kwh is None else [f"{self.kwh / size:,.3g} {unit}"]),
            *([] if self.co2_kg is None else [f"{self.co2_kg / 1e3:,.3g} t CO2"]),
        ]
        failures = (
            f"a failure every {self.failure_s / 3600:,.3g} h on {units.counted(count, 'device')} "
            f"({self.terms.device_hours:,.0f} h each), {units.format_seconds(self.terms.restart_s)} to restart"
        )
        lines = [
            f"run     {units.format_count(self.tokens)} tokens, {steps:,} steps: {self.days:.3g} days{words}"
            + "".join(f", {each}" for each in known),
            f"goodput {self.goodput:.1%}: {failures}; a checkpoint every {units.format_seconds(self.save_s)}, "
            f"for which training stands {units.format_seconds(self.stall_s)}"
            + ("" if self.write_s is None else f" and the store writes {units.format_seconds(self.write_s)}"),
        ]
        if self.loss is not None:
            lines.append(
                f"loss    about {self.loss:.3f} by Chinchilla's law for text; 10% more tokens, for 10% more money and "
                f"time: {expected_loss(self.candidate.question, 1.1 * self.tokens) or 0.0:.3f}"
            )
        else:
            lines.append(f"more    10% more money and time buy {units.format_count(0.1 * self.tokens)} tokens more")
        return lines

    def table(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "tokens": self.tokens, "days": self.days, "goodput": self.goodput, "dollars": self.dollars,
            "kwh": self.kwh, "co2_kg": self.co2_kg, "loss": self.loss, "save_s": self.save_s, "stall_s": self.stall_s,
            "write_s": self.write_s, "failure_s": self.failure_s,
            "days_low": None if self.band is None else self.days * self.band.low,
            "days_high": None if self.band is None else self.days * self.band.high,
        }  # fmt: skip


def expected_loss(question: Question, tokens: float) -> float | None:
    """Return the expected loss after `tokens` tokens, or None for models that are not dense decoders."""
    shape = question.job.shape
    if question.model.traced is not None or question.job.adapter is not None or shape.num_experts:
        return None
    return _E + _A / shape.num_params**_ALPHA + _B / tokens**_BETA


def full_run(one: Candidate, terms: RunTerms) -> FullRun:
    """Compute duration, cost and loss of a run with one plan.

    Raises:
        ConfigError: if the settings do not define the run's end, a budget is given without a known price, the loss
            cannot be reached, failures are too frequent, or checkpoints are requested faster than the storage allows.
    """
    question = one.question
    failure_s = terms.device_hours * 3600 / question.cluster.num_devices
    states = one.memory.get("parameters", 0.0) + one.memory.get("optimizer", 0.0)
    copy_s = _LEAST_STALL_S + states / (question.cluster.device.host_bytes_per_s or _COPY_RATE)
    stall_s = copy_s if terms.stall_s is None else terms.stall_s
    write_s = _write_s(question, terms)
    # Young's formula for the interval, limited to 5 minutes to a day.
    best_s = min(_DAY, max(one.step_s, _LEAST_SAVE_S, math.sqrt(2 * stall_s * failure_s)))
    save_s = terms.save_s or max(best_s, write_s or 0.0)
    good = goodput(failure_s, save_s, stall_s, terms.restart_s)
    if good < _LEAST_GOODPUT:
        failing = (
            f"{units.counted(question.cluster.num_devices, 'device')} fail every {units.format_seconds(failure_s)}"
        )
        rule = f"{failing}, and no step between two failures lasts"
        remedy = "Use a longer mtbf, or a shorter save and restart"
        raise _error("mtbf", f"mtbf={units.format_seconds(terms.device_hours * 3600)}: {rule}. {remedy}.")
    cost = one.cost(terms.price)
    per_token = one.step_s / good / question.job.tokens
    price = None if cost.price is None else cost.price / one.step_s
    if terms.budget is not None:
        if not price:
            raise _error(
                "budget", f"budget={terms.budget:g}: no price of {question.cluster.device.name} is known. Add --price."
            )
        tokens = terms.budget / price / per_token
    else:
        tokens = terms.tokens or _tokens_for(question, terms.loss)
    seconds = tokens * per_token
    return FullRun(
        terms=terms,
        candidate=one,
        tokens=tokens,
        seconds=seconds,
        goodput=good,
        failure_s=failure_s,
        save_s=save_s,
        stall_s=stall_s,
        write_s=write_s,
        dollars=None if price is None else price * seconds,
        kwh=None if cost.energy_kwh is None else cost.energy_kwh / one.step_s * seconds,
        loss=expected_loss(question, tokens),
        band=band_of(one),
    )


def goodput(failure_s: float, save_s: float, stall_s: float, restart_s: float) -> float:
    """Return the share of time spent on steps that are not lost to failures, with random failures.

    This is the full model of Daly's "A higher order estimate of the optimum checkpoint interval" (2006), in which
    failures may also occur during restarts and checkpoints.

    Args:
        failure_s: average time (s) between failures.
        save_s: training time (s) between two checkpoints.
        stall_s: time (s) that training waits for a checkpoint.
        restart_s: time (s) from a failure to the next step.
    """
    work = min(700.0, (save_s + stall_s) / failure_s)
    return save_s / (failure_s * math.exp(min(700.0, restart_s / failure_s)) * math.expm1(work))


def _write_s(question: Question, terms: RunTerms) -> float | None:
    """Return the time (s) to write trained weights and optimizer states to storage, or None if its rate is unknown.

    Raises ConfigError if checkpoints are taken faster than they can be written.
    """
    if terms.store_rate is None:
        return None
    job = question.job
    trained = job.shape.num_params if job.adapter is None else job.adapter.params * job.shape.layers
    size = trained * job.stack.main_bytes
    found = size / terms.store_rate
    if terms.save_s is not None and terms.save_s < found:
        rule = f"the store takes {units.format_seconds(found)} for the {units.format_bytes(size)} of a checkpoint"
        raise _error("save", f"save={units.format_seconds(terms.save_s)}: {rule}. Save less often, or leave it out.")
    return found


def _tokens_for(question: Question, loss: float | None) -> float:
    if loss is None:
        raise _error("run", "run: its end is not set. Write e.g. --run tokens=1T, loss=2.2 or budget=5000usd.")
    least = expected_loss(question, math.inf)
    if least is None:
        raise _error("loss", f"loss={loss:g}: the loss law covers only dense decoders. Use tokens=1T.")
    if loss <= least:
        rule = f"{question.model.name} never gets below {least:.3f}, by Chinchilla's law"
        raise _error("loss", f"loss={loss:g}: {rule}. Use more, or a larger model.")
    return (_B / (loss - least)) ** (1 / _BETA)


def read_run(text: str, price: float | None = None) -> RunTerms:
    """Parse the settings of a run, such as "tokens=15T,mtbf=50000h,restart=10m,save=5m,grid=france".

    Raises:
        ConfigError: for an unknown name or an invalid value, or unless one of tokens, loss and budget is set.
    """
    found, ends = RunTerms(price=price), 0
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in word.partition("="))
        known = _WORDS.get(name)
        if known is None:
            hint = did_you_mean(name, list(_WORDS)) or f" Known: {', '.join(_WORDS)}."
            raise _error(name, f"run={name}: not a field of a run.{hint}")
        field, read, example = known
        try:
            number = read(value)
        except ValueError:
            number = -1.0
        if not 0 < number < math.inf:
            kind = f"a number above 0 or one of {', '.join(grids())}" if name == "grid" else "a number above 0"
            raise _error(name, f"{name}={value}: {kind} is needed. Write e.g. {name}={example}.")
        found, ends = replace(found, **{field: number}), ends + (name in ("tokens", "loss", "budget"))
    if ends != 1:
        rule = "its end is not set" if not ends else "tokens, loss and budget each set its end"
        raise _error("run", f"run={text}: {rule}. Write one of them, e.g. --run tokens=1T.")
    return found


def full_runs(
    model: Any, clusters: str, text: str, price: float | None = None, sort: SortBy = "time", **options: Any
) -> list[tuple[Answer[Candidate], FullRun | None]]:
    """Compute a full run on each of the comma-separated clusters.

    Runs with most tokens per dollar precede, or for another `sort` than "time" runs with most tokens per kWh. The run
    is None if no plan fits.

    Raises:
        ConfigError: for invalid input, and as in `full_run`.
    """
    terms = read_run(text, price)
    if sort == "co2" and terms.grid is None:
        raise _error("sort", "sort=co2: the carbon intensity is needed. Add grid=france or grid=369 to --run.")
    if not clusters.strip(" ,"):
        raise _error("cluster", f"cluster={clusters!r}: it names none. Use e.g. 8xh100, or 8xh100,8xa100.")
    found: list[tuple[Answer[Candidate], FullRun | None]] = []
    for cluster in filter(None, (each.strip() for each in clusters.split(","))):
        reply = ranked_by(answer(Question.of(model, cluster, **options)), sort)
        found.append((reply, None if reply.best is None else full_run(reply.best, terms)))

    def order(run: FullRun | None) -> tuple[bool, float, float]:  # most tokens per dollar or kWh, then least time
        if run is None:
            return True, 0.0, 0.0
        return False, ((run.dollars if sort == "time" else run.kwh) or math.inf) / run.tokens, run.seconds

    return sorted(found, key=lambda one: order(one[1]))


def _error(field: str, message: str) -> ConfigError:
    return ConfigError([Problem(field, message)])


_WORDS: dict[str, tuple[str, Callable[[str], float], str]] = {
    "tokens": ("tokens", units.parse_count, "1T"),
    "loss": ("loss", float, "2.2"),
    "budget": ("budget", lambda text: float(text.lower().removesuffix("usd").lstrip("$")), "5000usd"),
    "mtbf": ("device_hours", lambda text: units.parse_seconds(text) / 3600, "50000h"),
    "restart": ("restart_s", units.parse_seconds, "10m"),
    "save": ("save_s", units.parse_seconds, "15m"),
    "stall": ("stall_s", units.parse_seconds, "5s"),
    "grid": ("grid", carbon_intensity, "369g"),
    "store": ("store_rate", lambda text: float(units.parse_bytes(text.removesuffix("/s"))), "10GB/s"),
}
