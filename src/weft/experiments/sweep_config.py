"""The file of a sweep: settings to search, their ranges, the number of trials, halving and budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.files import format_config, load_config, read_tables
from weft.config.parsing import as_toml
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, Problem, did_you_mean, shown
from weft.experiments.ab import why_incomparable
from weft.monitor.accounting import Price
from weft.units import parse_count, parse_seconds

SAMPLERS = ("tpe", "random", "grid", "qmc")
_KEYS = ("config", "settings", "trials", "batch", "seed", "sampler", "metric", "goal", "on", "cores", "gpus", "timeout",
         "halving", "budget", "search")  # fmt: skip
_RANGE_KEYS = ("low", "high", "log", "step")
#: Combinations that a grid may have.
_MAX_GRID = 10_000
_MAX_TRIALS = 10_000
#: Settings that a sweep sets for each trial.
_RESERVED = ("run.name", "run.dir", "run", "train.stop_at", "train.steps", "train.epochs", "train.max_time")

Value = float | int | str | bool


@dataclass(frozen=True, slots=True)
class Parameter:
    """A setting and its values: a range, or choices.

    Attributes:
        key: setting such as "optimizer.lr" or "plan.tp".
        low, high: ends of the range, both included; integers for a range of integers.
        log: sample on a logarithmic scale.
        step: distance between values, or None for any value.
        choices: the values, instead of a range.
    """

    key: str
    low: float | int = 0
    high: float | int = 0
    log: bool = False
    step: float | int | None = None
    choices: tuple[Value, ...] = ()

    @property
    def is_integer(self) -> bool:
        """True for a range of integers."""
        return not self.choices and isinstance(self.low, int) and isinstance(self.high, int)

    def grid(self) -> list[Value]:
        """Return all values. Empty for a range without a step."""
        if self.choices:
            return list(self.choices)
        step = self.step or (1 if self.is_integer and not self.log else None)
        if step is None:
            return []
        number = min(int((self.high - self.low) / step + 1e-9) + 1, _MAX_GRID + 1)
        return [self.low + n * step for n in range(number)]

    def override(self, value: Value) -> str:
        """Return a value as an argument of `weft train`."""
        return f"{self.key}={value if isinstance(value, str) else as_toml(value)}"


@dataclass(frozen=True, slots=True)
class SweepBudget:
    """Limits of a sweep. No further rung starts that would exceed `steps`, or after another limit is reached.

    Attributes:
        steps: optimizer steps of all trials.
        time_s: seconds of all trials together.
        money: in the currency of `price`, the price of a device.
        kwh: energy of all trials, as `[energy]` of their config measures or estimates it.
    """

    steps: int | None = None
    time_s: float | None = None
    money: float | None = None
    price: Price | None = None
    kwh: float | None = None


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """A checked sweep. `docs/how-to/sweep.md` describes the keys of its file.

    Attributes:
        base: the config of all trials as TOML.
        batch: trials whose values are chosen together, before any of them has a result.
        rungs: steps at which trials are compared; the last is the run's length.
        reduction: one of this many trials continues after a rung.
    """

    base: str
    steps: int
    parameters: tuple[Parameter, ...]
    trials: int
    batch: int
    seed: int
    sampler: str
    metric: str
    goal: str
    on: str
    cores: int
    gpus: int
    timeout: str | None
    rungs: tuple[int, ...]
    reduction: int
    budget: SweepBudget

    def identity(self) -> dict[str, Any]:
        """Return the values that must not change when a sweep continues."""
        names = ("base", "seed", "sampler", "metric", "goal", "reduction")
        search = {p.key: repr(p) for p in self.parameters}
        return {**{name: getattr(self, name) for name in names}, "rungs": list(self.rungs), "search": search}


def read_sweep(path: Path, on: str | None = None) -> SweepConfig:
    """Read and check a sweep's file.

    Args:
        path: TOML file.
        on: address of the workers, instead of the file's.

    Raises:
        ConfigError: with every problem found.
    """
    tables, problems = read_tables(path, "sweep"), []
    for key in tables:
        if key not in _KEYS:
            hint = did_you_mean(key, _KEYS) or f" Known: {', '.join(_KEYS)}."
            problems.append(Problem(key, f"{key}: a sweep has no such key.{hint}"))
    read = _Reader(tables, problems)
    base_path = read.of_type("config", str, "")
    settings = read.of_type("settings", list, [])
    sampler, goal = read.one_of("sampler", "tpe", SAMPLERS), read.one_of("goal", "lowest", ("lowest", "highest"))
    trials = read.number("trials", 16, 1, _MAX_TRIALS)
    batch = read.number("batch", trials if sampler != "tpe" else min(trials, 8), 1, _MAX_TRIALS)
    seed = read.number("seed", 0, 0, 2**31 - 1)
    halving = read.table("halving", ("rungs", "reduction"))
    reduction = halving.number("reduction", 2, 2, 100)
    num_rungs = halving.number("rungs", 1 if "halving" not in tables else 4, 1, 20)
    budget = _budget(read.table("budget", ("steps", "time", "money", "price", "kwh")))
    search = tables.get("search")
    if not isinstance(search, dict) or not search:
        problems.append(
            Problem("search", 'search: it is missing. Write [search] and "optimizer.lr" = {low = 1e-5, ...}')
        )
        search = {}
    settings_of_search = list(_flat(search))
    problems += _repeated([key for key, _ in settings_of_search])
    parameters = [found for key, value in settings_of_search if (found := _parameter(key, value, problems))]
    if sampler == "grid":
        problems += _grid_problems(parameters)
        num_points = math.prod(len(one.grid()) for one in parameters)
        trials = min(num_points, trials if "trials" in tables else _MAX_TRIALS)  # more would repeat points
        batch = min(batch, trials) if "batch" in tables else trials
    if problems:
        raise ConfigError([Problem(one.field, one.message, str(path)) for one in problems])
    file = path.parent / base_path if base_path else None
    config = load_config(file, [str(one) for one in settings]).config
    if config.train.epochs is not None:
        raise ConfigError("train.epochs: a sweep compares trials at the same step. Use train.steps.")
    _refuse_other_evaluations(parameters, has_eval_data=bool(config.data.eval))
    _try_values(file, [str(one) for one in settings], parameters)
    steps = config.train.steps
    rungs = sorted({max(1, round(steps / reduction**n)) for n in range(num_rungs)})
    return SweepConfig(
        base=format_config(config), steps=steps, parameters=tuple(parameters), trials=trials, batch=min(batch, trials),
        seed=seed, sampler=sampler, metric=read.of_type("metric", str, "loss"), goal=goal,
        on=on or read.of_type("on", str, "local"), cores=read.number("cores", 0, 0, 10_000),
        gpus=read.number("gpus", 0, 0, 1000), timeout=read.of_type("timeout", str, None), rungs=tuple(rungs),
        reduction=reduction, budget=budget,
    )  # fmt: skip


def _refuse_other_evaluations(parameters: Sequence[Parameter], *, has_eval_data: bool) -> None:
    """Raise ConfigError if trials would be evaluated on different samples, or by metrics of different meaning."""
    for key in (one.key for one in parameters):
        if key in ("train.global_batch", "eval.batches"):
            raise ConfigError(
                f"search.{key}: an evaluation reads eval.batches x train.global_batch samples, so trials would be "
                "evaluated on different ones. Compare two batch sizes by weft ab, with equal products."
            )
        if key != "seed" and why_incomparable(key, "eval.loss", has_eval_data=has_eval_data):
            raise ConfigError(
                f"search.{key}: evaluations of trials that differ in it do not measure the same. Search settings of "
                "the optimizer, schedule, model, adapter or plan; data.train needs data.eval."
            )


class _Reader:
    """Reads values of a table, and collects problems."""

    def __init__(self, tables: dict[str, Any], problems: list[Problem], prefix: str = ""):
        self.tables, self.problems, self._prefix = tables, problems, prefix

    def refuse(self, key: str, rule: str) -> None:
        name = self._prefix + key
        self.problems.append(Problem.of(name, shown(self.tables.get(key)), rule))

    def of_type(self, key: str, kind: type, default: Any) -> Any:
        value = self.tables.get(key, default)
        if key in self.tables and not isinstance(value, kind):
            self.refuse(key, f"it must be a {'text' if kind is str else kind.__name__}. Leave it out for the default.")
            return default
        return value

    def one_of(self, key: str, default: str, known: tuple[str, ...]) -> str:
        value = self.tables.get(key, default)
        if value not in known:
            self.refuse(key, f"it must be {', '.join(known)}.{did_you_mean(str(value), known)}")
            return default
        return value

    def number(self, key: str, default: int, low: int, high: int) -> int:
        value = self.tables.get(key, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"it must be a whole number from {low} to {high}. Use {key} = {default}.")
            return default
        return value

    def table(self, key: str, known: tuple[str, ...]) -> _Reader:
        value = self.of_type(key, dict, {})
        for name in value:
            if name not in known:
                hint = did_you_mean(name, known) or f" Known: {', '.join(known)}."
                self.problems.append(Problem(f"{key}.{name}", f"{key}.{name}: there is no such key.{hint}"))
        return _Reader(value, self.problems, f"{key}.")


def _budget(read: _Reader) -> SweepBudget:
    tables = read.tables
    steps = time_s = price = None
    try:
        key = "steps"
        steps = parse_count(tables[key]) if key in tables else None
        key = "time"
        time_s = parse_seconds(tables[key]) if key in tables else None
        key = "price"
        price = Price.parse(str(tables[key])) if key in tables else None
    except (ValueError, TypeError) as error:
        read.refuse(key, f"{str(error).rstrip('.')}.")
    money = tables.get("money")
    for key, example in (("money", 50), ("kwh", 3)):
        value = tables.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            read.refuse(key, f"it must be a number above 0. Use {key} = {example}.")
    if money is not None and price is None:
        read.refuse("money", 'it needs the price of a device. Add price = "2.5usd/h" to [budget].')
    return SweepBudget(steps, time_s, money, price, tables.get("kwh"))


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of [search]. A setting may be a dotted key without quotes, which TOML reads as tables."""
    for key, value in table.items():
        if isinstance(value, dict) and value and all(isinstance(one, dict | list) for one in value.values()):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _repeated(keys: Sequence[str]) -> Iterator[Problem]:
    for n, key in enumerate(keys):
        if twice := [one for one in keys[:n] if f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.")]:
            yield Problem(f"search.{key}", f"search.{key}: search.{twice[0]} sets it, too. Remove one of them.")


def _parameter(key: str, value: Any, problems: list[Problem]) -> Parameter | None:
    """Return a parameter of [search], or None after adding a problem."""
    name = f"search.{key}"

    def refuse(rule: str) -> None:
        problems.append(Problem(name, f"{name}={shown(value)}: {rule}"))

    if key in _RESERVED:
        refuse("a sweep sets it itself, or compares trials at it. Search another setting.")
        return None
    if isinstance(value, list):
        if len(value) < 2 or any(not isinstance(one, float | int | str | bool) for one in value):
            refuse("choices must be at least two numbers, texts or booleans. Use [1e-4, 1e-3].")
            return None
        if len(set(map(repr, value))) < len(value):
            refuse("a choice occurs twice. Remove it.")
            return None
        return Parameter(key, choices=tuple(value))
    if not isinstance(value, dict) or not {"low", "high"} <= set(value):
        refuse("it must be a range or choices. Use {low = 1e-5, high = 1e-2, log = true}, or [1e-4, 1e-3].")
        return None
    if odd := [one for one in value if one not in _RANGE_KEYS]:
        refuse(f"a range has no {odd[0]!r}.{did_you_mean(odd[0], _RANGE_KEYS) or ' Use low, high, log, step.'}")
        return None
    return _range(key, value, refuse)


def _range(key: str, value: dict[str, Any], refuse: Any) -> Parameter | None:
    low, high, log, step = value["low"], value["high"], value.get("log", False), value.get("step")
    numbers = [one for one in (low, high, step) if one is not None]
    if any(isinstance(one, bool) or not isinstance(one, int | float) or not math.isfinite(one) for one in numbers):
        return refuse("low, high and step must be finite numbers. Use {low = 1, high = 8}.")
    if not isinstance(log, bool):
        return refuse("log must be true or false.")
    if low >= high:
        return refuse(f"low must be below high. Use {{low = {high}, high = {low}}}.")
    if log and low <= 0:
        return refuse("a logarithmic range cannot reach 0 or less. Use a low above 0, such as 1e-5, or log = false.")
    if step is not None and (log or not 0 < step <= high - low):
        return refuse("step must be above 0 and at most high - low, and excludes log. Leave out one of them.")
    is_integer = isinstance(low, int) and isinstance(high, int) and isinstance(step, int | None)
    if not is_integer:
        low, high = float(low), float(high)
    return Parameter(key, low, high, log, step)


def _grid_problems(parameters: list[Parameter]) -> list[Problem]:
    number = 1
    for one in parameters:
        values = one.grid()
        if not values:
            return [Problem(one.key, f"search.{one.key}: a grid needs choices or a step. Add step = ..., or use tpe.")]
        number *= len(values)
    if number > _MAX_GRID:
        about = "more than " if any(len(one.grid()) > _MAX_GRID for one in parameters) else ""
        return [
            Problem(
                "sampler",
                f"sampler=grid: the grid has {about}{number:,} points, and at most {_MAX_GRID:,} are allowed. Use "
                "fewer values, or sampler = 'tpe'.",
            )
        ]
    return []


def _try_values(file: Path | None, settings: list[str], parameters: list[Parameter]) -> None:
    """Load the config with each parameter's ends or choices.

    Raises:
        ConfigError: for unknown settings, and for a parameter with an illegal value.
    """
    problems: dict[str, Problem] = {}
    for one in parameters:
        for value in one.choices or (one.low, one.high):
            try:
                load_config(file, [*settings, one.override(value)])
            except ConfigError as error:
                for problem in error.problems:
                    problems.setdefault(problem.message, Problem(problem.field, f"search.{one.key}: {problem.message}"))
    if problems:
        raise ConfigError(problems.values())


def trial_config(base: Path, overrides: list[str]) -> RunConfig:
    """Return the config of a trial."""
    return load_config(base, overrides).config
