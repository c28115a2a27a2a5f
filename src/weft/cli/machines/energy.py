"""`weft energy`: energy and cost of a run, meters of this machine, and tuning of power limits and clocks."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from weft import env
from weft.cli.console import print_line
from weft.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from weft.energy.host_meter import HostMeter
    from weft.energy.limits import DeviceLimit
    from weft.energy.search import Try

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Energy of runs, and tuning of power limits.")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/quickstart.", show_default=False)]
#: Time (s) without a step after which tuning ends, or this many times a step if that is longer.
_SILENT_S, _SILENT_STEPS = 120.0, 20.0
#: Windows that are started again because an evaluation or a save happened in them.
_MOST_REPEATS = 10
#: Events during which the run does not step.
_NO_STEPS = frozenset({"eval", "checkpoint", "copy", "trace"})
_ENDS = frozenset({"end", "failure", "held"})


@app.command()
def show(run: Run, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show a run's energy by cause, per token, and its cost and CO2."""
    from weft.monitor.dashboard.run_index import RunCatalog

    if not (run / "events.jsonl").is_file():
        raise ConfigError(
            f"RUN={run}: no run has started in this folder. Give a run's folder, such as runs/quickstart."
        )
    catalog = RunCatalog(run)
    catalog.read_all()
    found = next(iter(catalog.runs.values()))
    summary = found.ledger.energy_summary()
    if as_json:
        typer.echo(json.dumps(summary.as_json(), indent=1))
    else:
        print("\n".join(summary.lines(found.rate_unit)))


@app.command()
def meters() -> None:
    """List the energy meters of this machine, and the reasons for missing ones."""
    from weft.energy.host_meter import host_meter
    from weft.energy.meters import Unmeasured, load_nvml

    try:
        nvml = load_nvml()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        gpus = [str(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except Unmeasured as reason:
        nvml, gpus = None, []
        print(f"GPUs: unmeasured: {reason}")
    for one in host_meter(gpus, sysfs=env.sysfs(), nvml=nvml).describe():
        print(f"{one['name']}: {one['label']}: {one['basis']}")


@app.command()
def restore() -> None:
    """Restore limits of a tuning that was killed together with the process that guards it."""
    from weft.energy.guard import restore_earlier, take_lock

    handle = take_lock()
    try:
        restored = restore_earlier(env.sysfs())
    finally:
        os.close(handle)
    print_line("all limits are restored." if restored else "no tuning has left a limit behind.")


# `weft energy tune`.


@app.command()
def tune(
    run: Run,
    max_slowdown: Annotated[str, typer.Option("--max-slowdown", help="Largest slowdown of a step.")] = "5%",
    by: Annotated[
        Literal["auto", "power", "clock", "cpu"],
        typer.Option(
            help="power limit or locked clock of GPUs, or frequency of CPUs; auto: power, or cpu without GPUs"
        ),
    ] = "auto",
    steps: Annotated[int, typer.Option(min=2, help="Steps of one try, at least.")] = 20,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of one try, at least.")] = 5.0,
    tries: Annotated[int, typer.Option(min=6, max=100, help="Number of tries.")] = 12,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the power limit or clock with the least energy per step, on a run that trains on this machine.

    All limits are restored at the end, after errors and after a kill. The result is a command that sets the choice.
    """
    from weft.energy.guard import Guarded
    from weft.energy.limits import NoRights, limit_of
    from weft.energy.search import LimitSearch
    from weft.energy.tuner import tune as tune_limit

    slowdown = _share(max_slowdown)
    gpus = _gpus_of(run)
    limit = limit_of(by, gpus, env.sysfs())
    if len(limit.values) < 2:
        raise ConfigError(
            f"--by={by}: the {limit.name} is already at its minimum, {min(limit.values)}. Raise it first."
        )
    search = LimitSearch(limit.values, slowdown, tries)
    try:
        limit.check_rights()
        live = LiveSteps(run / "events.jsonl", _meter(gpus), steps, seconds)
        with Guarded(limit.state, env.sysfs()) as guarded:
            found = tune_limit(limit, guarded, live.measure, search, lambda number, one: _report(number, one, tries))
    except NoRights as error:
        command = ["sudo", sys.executable, "-m", "weft", "energy", "tune", str(run.resolve())]
        command += [f"--max-slowdown={max_slowdown}", f"--by={by}", f"--steps={steps}", f"--tries={tries}"]
        raise ConfigError(_without_rights(error, limit, command, f"at most {tries} tries of {steps} steps")) from None
    except OSError as error:
        raise LaunchError(f"{error}. All limits are restored.") from error
    if as_json:
        table = {"name": limit.name, "value": found.value, "present": found.present, "time": found.time}
        table |= {"energy": found.energy, "command": limit.command(found.value)}
        typer.echo(
            json.dumps({**table, "tries": [[one.value, one.step_s, one.joules] for one in found.tries]}, indent=1)
        )
    elif found.value == found.present:
        print(f"{limit.name}: keep {found.present}. No value within {slowdown:.1%} saves 1 % of the energy.")
    else:
        print(
            f"{limit.name}: {found.value} instead of {found.present}: {found.energy - 1:+.1%} energy per step, "
            f"{found.time - 1:+.1%} time.\nAll limits are restored. To set it: {limit.command(found.value)}"
        )


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value <= 10:
        raise ConfigError(f"--max-slowdown={text}: a share above 0 is needed. Use e.g. 5% or 0.05.")
    return value


def _gpus_of(run: Path) -> list[str]:
    """Return the GPUs of a run that trains on this machine, [] for a run on CPUs.

    Raises:
        ConfigError: if it does not train on this machine alone.
    """
    from weft.cli.runs import is_training, known_run
    from weft.monitor.events import read_events

    if not is_training(known_run(run)):
        raise ConfigError(f"RUN={run}: tuning needs live steps, and no command trains in this folder. Start it first.")
    start: dict[str, Any] = {}
    energy: dict[str, Any] = {}
    for event in read_events(run / "events.jsonl"):
        if event.get("event") == "start":
            start, energy = event, {}
        elif event.get("event") == "energy" and "devices" in event:
            energy = event
    machine = start.get("machine")
    host = machine.get("host") if isinstance(machine, dict) else None
    if host != os.uname().nodename:
        raise ConfigError(f"RUN={run}: it trains on {host or 'an unknown machine'}. Run this command there.")
    if energy.get("num_hosts", 1) != 1:
        raise ConfigError(
            f"RUN={run}: it trains on {energy['num_hosts']} machines, and this command sets limits of one. Tune a run "
            "of the same config on one machine."
        )
    devices = energy.get("devices")
    names = [str(one.get("name")) for one in devices if isinstance(one, dict)] if isinstance(devices, list) else []
    gpus = [name for name in names if name.startswith("GPU-")]
    if start.get("device") != "cpu" and not gpus:
        raise ConfigError(f"RUN={run}: its events do not name its GPUs. Train with energy.meter=true.")
    return gpus


def _meter(gpus: list[str]) -> HostMeter:
    from weft.energy.host_meter import host_meter
    from weft.energy.meters import load_nvml

    meter = host_meter(gpus, sysfs=env.sysfs(), nvml=load_nvml() if gpus else None)
    measured = {one.name for one in meter.meters if one.label == "measured"}
    if measured.issuperset(gpus) if gpus else measured:
        return meter
    raise ConfigError(
        f"RUN: no energy is measured on this machine ({'; '.join(meter.unmeasured.values())}), and an estimate cannot "
        "show what a limit saves. Use a machine with counters."
    )


class LiveSteps:
    """Measures time and energy of steps of a run that trains, from its event log and this machine's meters.

    Args:
        events: the run's event log.
        meter: this machine's meter.
        num_steps, seconds: least number of steps and least time of a measurement.
    """

    def __init__(self, events: Path, meter: HostMeter, num_steps: int, seconds: float):
        from weft.monitor.sinks.pump import EventFollower

        self._follower, self._meter = EventFollower(events), meter
        self._num_steps, self._seconds = num_steps, seconds
        self._follower.skip_to_tail(0)
        self._step_s = 0.0

    def measure(self, value: int) -> Try:
        """Return the mean step under the present limits.

        The steps that have begun are left out. An evaluation, a save or a missing reading starts the measurement again.

        Raises:
            LaunchError: if the run ends, pauses, or makes no step for long, or never steps long enough without a break.
        """
        from weft.energy.search import Try

        self._next_steps(2)
        for _ in range(_MOST_REPEATS):
            begin, joules = time.monotonic(), self._meter.read().joules
            found = self._window(begin)
            if found is not None:
                elapsed, grown = time.monotonic() - begin, self._meter.read().joules - joules
                if self._meter.take_notes():  # a counter was reset or not readable
                    continue
                if grown <= 0:
                    raise LaunchError("the energy counters do not advance. All limits are restored.")
                self._step_s = statistics.fmean(found)
                return Try(value, self._step_s, grown / elapsed * self._step_s)
            self._next_steps(1)
        raise LaunchError(
            f"evaluations or saves come within {self._num_steps} steps, or the energy counters cannot be read. Use "
            "fewer --steps. All limits are restored."
        )

    def _window(self, begin: float) -> list[float] | None:
        """Return the seconds of the steps of a window, or None if an evaluation or a save happened in it."""
        found: list[float] = []
        while len(found) < self._num_steps or time.monotonic() - begin < self._seconds:
            steps, is_broken = self._next_steps(1)
            if is_broken:
                return None
            found += steps
        return found

    def _next_steps(self, count: int) -> tuple[list[float], bool]:
        """Wait for `count` steps. Return the seconds of all new steps, and whether something else happened too."""
        from weft.monitor.events import number

        found, is_broken, since = list[float](), False, time.monotonic()
        while len(found) < count:
            events, self._follower.offset = self._follower.read()
            for event in events:
                kind = event.get("event")
                if kind in _ENDS:
                    raise LaunchError(f"the run no longer trains (event {kind}). All limits are restored.")
                is_broken = is_broken or kind in _NO_STEPS
                seconds = event.get("seconds")
                total = number(seconds.get("total")) if isinstance(seconds, dict) else 0.0
                if kind == "step" and total > 0:
                    found.append(total)
            if time.monotonic() - since > max(_SILENT_S, _SILENT_STEPS * self._step_s):
                raise LaunchError("the run makes no steps. All limits are restored.")
            if len(found) < count:
                time.sleep(0.02)
        return found, is_broken


def _report(number: int, one: Try, tries: int) -> None:
    print_line(f"try {number} of {tries}: {one.value}: {one.step_s * 1e3:.4g} ms, {one.joules:.4g} J a step")


def _without_rights(error: Exception, limit: DeviceLimit, command: list[str], effort: str) -> str:
    low, high = limit.values[0], limit.values[-1]
    return (
        f"{limit.name}: {error}. Nothing was changed. An administrator must type: {shlex.join(command)}\nIt would try "
        f"{len(limit.values)} values from {low} to {high}, in {effort}, and restore {high}."
    )
