"""A search for good settings: Optuna chooses values, a pool trains the trials, and halving stops the worse ones.

A sweep is a replay. Each start goes through the same generations and rungs, and finds finished trials in their folders.
So a killed sweep ends like an undisturbed one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, MissingExtra, TasksFailed
from weft.experiments.sweep_config import Parameter, SweepConfig, Value, trial_config
from weft.files import replace_text
from weft.pools.pool import Pool
from weft.pools.task_folder import locked_folder
from weft.units import counted

#: Function that trains a trial. Tests use another one.
TRAIN = "weft.experiments.trials:train_trial"
#: Significant digits of sampled numbers, so that configs are readable.
_DIGITS = 5

Note = Callable[[str], None]


@dataclass
class SweepTrial:
    """Values of one trial, and its results.

    Attributes:
        values: by the key of the setting.
        curve: value of the metric by step.
        state: "paused", "stopped" by halving, "complete" or "failed".
        device_s: seconds of all its devices.
        kwh: energy of its run so far, or None without a reading.
    """

    number: int
    values: dict[str, Value]
    curve: dict[int, float] = field(default_factory=dict)
    state: str = "paused"
    reason: str = ""
    step: int = 0
    seconds: float = 0.0
    device_s: float = 0.0
    kwh: float | None = None

    @property
    def value(self) -> float:
        """Last value of the metric, or nan."""
        return self.curve[max(self.curve)] if self.curve else math.nan


@dataclass
class SweepResult:
    """Trials of a sweep so far.

    Attributes:
        over_budget: the limit that ended the sweep, or "".
    """

    config: SweepConfig
    folder: Path
    trials: list[SweepTrial] = field(default_factory=list)
    over_budget: str = ""

    @property
    def num_steps(self) -> int:
        """Steps of all trials."""
        return sum(trial.step for trial in self.trials)

    def ranked(self) -> list[SweepTrial]:
        """Return the trials, best first: complete ones, then those that went further, then failed ones."""
        sign = 1 if self.config.goal == "lowest" else -1

        def rank(trial: SweepTrial) -> tuple[float, ...]:
            return (trial.state == "failed", -trial.step, sign * trial.value if trial.curve else 0.0, trial.number)

        return sorted(self.trials, key=rank)

    @property
    def best(self) -> SweepTrial | None:
        """The best trial of those that trained furthest, or None if all failed."""
        ranked = self.ranked()
        return ranked[0] if ranked and ranked[0].curve and ranked[0].state != "failed" else None


def import_optuna() -> Any:
    """Return the optuna module, which logs warnings only.

    Raises:
        MissingExtra: if it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise MissingExtra("optuna", "sweep", "weft sweep") from error
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


@contextmanager
def sweep_folder(config: SweepConfig, folder: Path) -> Iterator[None]:
    """Hold the lock of a sweep's folder, and write its base config.

    Raises:
        ConfigError: if another command works in it, or it belongs to another sweep.
        PoolError: if the disk is full.
    """
    with locked_folder(folder):
        _claim(folder, config)
        yield


def _claim(folder: Path, config: SweepConfig) -> None:
    about, identity = folder / "sweep.json", config.identity()
    if about.exists():
        _refuse_other(about, identity)
    elif others := [path.name for path in folder.iterdir() if path.name[0] != "." and path.name != "base.toml"]:
        raise ConfigError(f"{folder}: it has other files, such as {others[0]}. Give a new folder.")
    else:
        replace_text(folder / "base.toml", config.base)
        replace_text(about, json.dumps(identity, indent=1) + "\n")


def _refuse_other(about: Path, identity: dict[str, Any]) -> None:
    try:
        known = json.loads(about.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{about}: it is damaged. Give another --out.") from error
    for key in identity:
        if known.get(key) != json.loads(json.dumps(identity[key])):
            what = "the config of its trials" if key == "base" else key
            raise ConfigError(
                f"{about.parent}: its sweep began with another value of {what}. Restore it to continue, or give "
                "another --out."
            )


def run_sweep(
    config: SweepConfig,
    folder: Path,
    pool: Pool,
    note: Note,
    after: Callable[[SweepResult], None] = lambda result: None,
    train: str | None = None,
) -> SweepResult:
    """Run the trials that a sweep's folder lacks. Call it inside `sweep_folder`.

    Args:
        config, folder, pool: the sweep, its locked folder, and its workers.
        note: prints a line.
        after: called after each generation.
        train: name of the function that trains a trial, by default TRAIN.

    Raises:
        ConfigError: if all trials of the first rung were refused or failed, or the budget allows no trial.
        PoolError: if the workers cannot be reached.
    """
    result = SweepResult(config, folder)
    while len(result.trials) < config.trials and not result.over_budget:
        generation = len(result.trials) // config.batch
        trials = _choose(result, folder / "generations" / f"{generation:04d}.json")
        result.trials += trials
        _run_generation(result, trials, pool, note, f"{generation:04d}", train or TRAIN)
        if not result.trials:
            raise ConfigError(f"{result.over_budget}, so no trial was trained. Increase the budget.")
        if generation == 0 and all(trial.state == "failed" for trial in trials):
            raise ConfigError(f"search: no trial can be trained. The first one: {trials[0].reason}")
        if not result.over_budget:
            _store(result)
        after(result)
    return result


# Choosing values.


def _choose(result: SweepResult, file: Path) -> list[SweepTrial]:
    """Return the trials of the next generation, from its file if there is one."""
    config, first = result.config, len(result.trials)
    if file.is_file():
        chosen = json.loads(file.read_bytes())
    else:
        chosen = _ask(result, min(config.batch, config.trials - first))
        file.parent.mkdir(exist_ok=True)
        replace_text(file, json.dumps(chosen, indent=1) + "\n")
    return [SweepTrial(first + n, values) for n, values in enumerate(chosen)]


def _ask(result: SweepResult, number: int) -> list[dict[str, Value]]:
    """Return the values of the next trials. The same results and seed give the same values."""
    optuna, config = import_optuna(), result.config
    distributions = {one.key: _distribution(optuna, one) for one in config.parameters}
    first, is_adaptive = len(result.trials), config.sampler == "tpe"
    with quiet():
        study = optuna.create_study(direction=_direction(config), sampler=_sampler(optuna, config, first))
        if is_adaptive:
            study.add_trials(_frozen(optuna, result.trials, config, distributions))
        # Samplers that ignore results continue a sequence from its start.
        asked = [study.ask(distributions).params for _ in range(number if is_adaptive else first + number)]
    return [{one.key: _value(one, params[one.key]) for one in config.parameters} for params in asked[-number:]]


def _sampler(optuna: Any, config: SweepConfig, first: int) -> Any:
    if config.sampler == "tpe":
        return optuna.samplers.TPESampler(
            seed=config.seed + first, n_startup_trials=min(10, config.batch), constant_liar=True
        )
    if config.sampler == "random":
        return optuna.samplers.RandomSampler(seed=config.seed)
    if config.sampler == "qmc":
        return optuna.samplers.QMCSampler(seed=config.seed, scramble=True)
    grid = {one.key: [_stored(one, value) for value in one.grid()] for one in config.parameters}
    return optuna.samplers.GridSampler(grid, seed=config.seed)


def _distribution(optuna: Any, one: Parameter) -> Any:
    kinds = optuna.distributions
    if one.choices:
        return kinds.CategoricalDistribution([_stored(one, value) for value in one.choices])
    if one.is_integer:
        return kinds.IntDistribution(one.low, one.high, log=one.log, step=one.step or 1)
    return kinds.FloatDistribution(one.low, one.high, log=one.log, step=one.step)


def _stored(one: Parameter, value: Value) -> Value:
    """Return a value as Optuna stores it. Choices are texts, because 1 and True are equal."""
    return json.dumps(value) if one.choices else value


def _value(one: Parameter, stored: Any) -> Value:
    if one.choices:
        return json.loads(stored)
    if one.is_integer or one.step:
        return stored
    return min(max(float(f"{stored:.{_DIGITS}g}"), one.low), one.high)


def _direction(config: SweepConfig) -> str:
    return "minimize" if config.goal == "lowest" else "maximize"


def _frozen(optuna: Any, trials: Sequence[SweepTrial], config: SweepConfig, distributions: dict[str, Any]) -> list[Any]:
    states = {"complete": "COMPLETE", "stopped": "PRUNED", "failed": "FAIL", "paused": "FAIL"}
    by_key = {one.key: one for one in config.parameters}
    return [
        optuna.trial.create_trial(
            state=optuna.trial.TrialState[states[trial.state]],
            value=trial.value if trial.state == "complete" else None,
            params={key: _stored(by_key[key], value) for key, value in trial.values.items()},
            distributions=distributions,
            intermediate_values=trial.curve,
        )
        for trial in trials
    ]


def _store(result: SweepResult) -> None:
    """Append finished trials to the study in the folder, for Optuna's own tools."""
    optuna, config = import_optuna(), result.config
    path = result.folder / "study.journal"
    # The sweep's lock excludes other writers: a lock of Optuna, or half a line, is left by a killed command.
    for lock in result.folder.glob("study.journal.*"):
        lock.unlink()
    if path.is_file():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)
    backend = optuna.storages.journal
    with quiet():
        storage = optuna.storages.JournalStorage(backend.JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, study_name="sweep", direction=_direction(config), load_if_exists=True
        )
        distributions = {one.key: _distribution(optuna, one) for one in config.parameters}
        study.add_trials(_frozen(optuna, result.trials, config, distributions)[len(study.trials) :])


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Optuna's warnings about experimental functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Training the trials of a generation, rung by rung.


def _run_generation(
    result: SweepResult, trials: list[SweepTrial], pool: Pool, note: Note, name: str, train: str
) -> None:
    config, alive = result.config, list(trials)
    for rung, step in enumerate(config.rungs):
        if reason := _over_budget(result, alive, step):
            result.over_budget = reason
            result.trials = [trial for trial in result.trials if trial.seconds]
            return
        names = ", ".join(f"{trial.number:04d}" for trial in alive[:8]) + (", ..." if len(alive) > 8 else "")
        note(f"{counted(len(alive), 'trial')} to step {step} of {config.steps}: {names}")
        items = [_item(result, trial, step) for trial in alive]
        for trial, outcome in zip(
            alive, _map(pool, train, items, result.folder / "rungs" / f"{name}_{rung}"), strict=True
        ):
            _record(trial, outcome, step, is_last=rung == len(config.rungs) - 1)
        alive = [trial for trial in alive if trial.state != "failed"]
        if not alive or rung == len(config.rungs) - 1:
            return
        sign = 1 if config.goal == "lowest" else -1
        alive.sort(key=lambda trial: (sign * trial.curve[step], trial.number))
        number = -(-len(alive) // config.reduction)
        for trial in alive[number:]:
            trial.state = "stopped"
        alive = sorted(alive[:number], key=lambda trial: trial.number)


def _item(result: SweepResult, trial: SweepTrial, step: int) -> dict[str, Any]:
    words = [one.override(trial.values[one.key]) for one in result.config.parameters]
    return {
        "config": str(result.folder / "base.toml"),
        "overrides": words,
        "folder": str(result.folder / "trials" / f"{trial.number:04d}"),
        "step": step,
        "metric": result.config.metric,
    }


def _map(pool: Pool, train: str, items: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    try:
        return pool.map(train, items, folder)
    except TasksFailed as failed:
        # The same command tries these trials again: the folder of results has no result for them.
        return [
            {"failed": failed.errors[n], "seconds": 0.0} if n in failed.errors else one
            for n, one in enumerate(failed.results)
        ]


def _record(trial: SweepTrial, outcome: dict[str, Any], step: int, *, is_last: bool) -> None:
    trial.seconds += outcome["seconds"]
    trial.device_s += outcome["seconds"] * outcome.get("devices", 1)
    if "failed" in outcome:
        trial.state, trial.reason = "failed", outcome["failed"]
        return
    trial.curve = {int(at): value for at, value in outcome["curve"]} | {step: outcome["value"]}
    trial.step, trial.kwh = step, outcome.get("kwh")
    trial.state = "complete" if is_last else "paused"


def _over_budget(result: SweepResult, alive: Sequence[SweepTrial], step: int) -> str:
    budget, trials = result.config.budget, result.trials
    more = sum(step - trial.step for trial in alive)
    if budget.steps is not None and result.num_steps + more > budget.steps:
        return f"budget.steps={budget.steps}: {result.num_steps} are done, and the next rung needs {more}"
    if budget.time_s is not None and sum(trial.seconds for trial in trials) >= budget.time_s:
        return f"budget.time: the trials trained for {sum(trial.seconds for trial in trials):.0f} s"
    if budget.money is not None and budget.price is not None:
        device_s = sum(trial.device_s for trial in trials)
        if budget.price.of(device_s) >= budget.money:
            return f"budget.money: the trials cost {budget.price.text(device_s)}"
    if budget.kwh is not None:
        unread = [trial.number for trial in trials if trial.step and trial.kwh is None]
        if unread:
            return (
                f"budget.kwh={budget.kwh:g}: trial {unread[0]:04d} has no reading of energy. `weft energy "
                "meters` lists the reasons; energy.cpu_watts or energy.gpu_watts in the base config makes an estimate"
            )
        used = sum(trial.kwh or 0.0 for trial in trials)
        if used >= budget.kwh:
            return f"budget.kwh={budget.kwh:g}: the trials used {used:.3g} kWh"
    return ""


def best_config(result: SweepResult) -> str | None:
    """Return the config of the best trial as TOML, or None if there is no best trial."""
    from weft.config.files import format_config

    best = result.best
    if best is None:
        return None
    words = [one.override(best.values[one.key]) for one in result.config.parameters]
    words += [f"run.name={result.folder.name}-best"]
    return format_config(trial_config(result.folder / "base.toml", words), only_changes=True)
