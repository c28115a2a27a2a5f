"""The hook that measures a run's energy: one rank of each machine reads its meters, and rank 0 records the readings."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from weft import env
from weft.config.energy import J_PER_KWH
from weft.config.run_config import RunConfig
from weft.energy.host_meter import HostMeter, MeterSettings, host_meter
from weft.errors import ConfigError
from weft.monitor.alerts import RunRequest, ask
from weft.monitor.energy_ledger import format_energy
from weft.monitor.events import StepRecord, number
from weft.train.engine import Engine, EngineJob, Evaluation
from weft.train.hooks import Hook
from weft.units import parse_seconds

#: Seconds between two readings before and after evaluations and saves, however often these are.
_LEAST_S = 1.0


def run_meter(job: EngineJob, engine: Engine, gpu: str | None) -> tuple[HostMeter | None, int]:
    """Return the meter of this machine on one rank of it, else None; and the number of machines. All ranks call it.

    gpu: UUID of this rank's GPU, or None.
    """
    host = env.pretended_host() or os.uname().nodename
    place = job.place
    is_reader = place is None or place.local_rank == 0
    record = json.dumps([host, gpu, is_reader]).encode()
    ranks = [json.loads(one) for one in engine.ranks.gather(record)]
    num_hosts = max(1, sum(1 for one in ranks if one[2]))
    if not is_reader:
        return None, num_hosts
    settings, world = job.config.energy, job.world
    others = world is not None and world.replica > 0 and job.config.launch.replica is None
    meter = host_meter(
        [one[1] for one in ranks if one[0] == host and one[1]],
        MeterSettings(cpu_watts=settings.cpu_watts, gpu_watts=settings.gpu_watts),
        sysfs=env.sysfs(),
        no_packages="replica 0 counts the CPU packages of this machine" if others else "",
    )
    return meter, num_hosts


class EnergyReports:
    """Passes readings of this machine to the monitoring thread, and of the other machines to the hook of rank 0."""

    def __init__(self, meter: HostMeter, publish: Callable[[Mapping[str, object]], None] | None):
        self._meter, self._publish = meter, publish
        self.others_j = 0.0

    def of_host(self) -> Mapping[str, float]:
        """Return the joules of this machine so far, if it has a meter, and the number of devices without one."""
        missing = {"host.energy_missing": float(len(self._meter.unmeasured))}
        if not self._meter.works:
            return missing
        found = self._meter.read()
        return {**missing, "host.energy_joules": found.joules, "host.energy_estimated_j": found.estimated_j}

    def on_metrics(self, event: Mapping[str, object]) -> None:
        """Publish a metrics event, after reading the other machines' energy from it."""
        others = number(event.get("energy_others_j"))
        self.others_j = others if others == others else self.others_j
        if self._publish is not None:
            self._publish(event)


class EnergyHook(Hook):
    """Writes an "energy" event after steps, evaluations and saves, and pauses the run if its budget is used up.

    A reading is written every `monitor.every`, and next to evaluations and saves, so that their energy is separate.

    Args:
        meter: this machine's meter.
        reports: receives the other machines' energy.
        config: the run's config.
        folder: the run's folder.
        before_j: joules of the run's earlier starts.
        num_hosts: number of machines of the run.
        write: writes an event.
        warn: called with a step and a line for users.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        meter: HostMeter,
        reports: EnergyReports,
        config: RunConfig,
        folder: Path,
        *,
        before_j: float,
        num_hosts: int,
        write: Callable[[Mapping[str, object]], None],
        warn: Callable[[int, str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._meter, self._reports, self._config, self._folder = meter, reports, config, folder
        self._before_j, self._num_hosts, self._write, self._warn, self._clock = before_j, num_hosts, write, warn, clock
        self._every_s = parse_seconds(config.monitor.every)
        self._step, self._items, self._joules, self._read_at = 0, 0.0, 0.0, -1e9
        self._is_near, self._has_paused = True, False

    def on_start(self, start_step: int) -> None:
        """Write the devices and the first reading.

        Raises:
            ConfigError: if there is a budget, and nothing measures the energy.
        """
        self._step = start_step
        budget = self._config.energy.budget
        if budget is not None and not self._meter.works:
            reasons = "; ".join(self._meter.unmeasured.values()) or "no device is known"
            raise ConfigError(
                f"energy.budget={budget:g}: the energy of this run cannot be measured here ({reasons}). Set "
                "energy.cpu_watts or energy.gpu_watts for an estimate, or leave energy.budget out."
            )
        about = {"num_hosts": self._num_hosts, "devices": self._meter.describe()}
        if self._meter.works:
            self._record(about)
        else:
            self._write({"event": "energy", "step": start_step, **about})

    def on_step(self, record: StepRecord) -> str | None:
        self._step, self._items = record.step, self._items + record.count
        last, (evaluates, saves) = self._config.train.steps, (self._config.eval.every, self._config.checkpoint.every)
        is_due = record.step == last or any(every and record.step % every == 0 for every in (evaluates, saves))
        self._read_when_due(near=is_due or self._is_near)
        self._is_near = is_due
        return None

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        self._read_when_due(near=True)
        return None

    def on_trace(self, event: Mapping[str, object]) -> None:
        self._read_when_due(near=True)

    def on_end(self, step: int, reason: str) -> None:
        if self._meter.works:
            self._record({})

    def _read_when_due(self, *, near: bool) -> None:
        if self._meter.works and self._clock() - self._read_at >= (_LEAST_S if near else self._every_s):
            self._record({})

    def _record(self, about: Mapping[str, object]) -> None:
        now, found = self._clock(), self._meter.read()
        total = found.joules + self._reports.others_j
        grown, elapsed = total - self._joules, now - self._read_at
        kwh = (self._before_j + total) * self._config.energy.pue / J_PER_KWH
        figures = {"energy.kwh": float(f"{kwh:.6g}")}
        if not about and elapsed > 0:
            figures["energy.watts"] = float(f"{grown / elapsed:.4g}")
            if self._items and grown > 0:
                figures["energy.j_per_item"] = float(f"{grown * self._config.energy.pue / self._items:.4g}")
        event: dict[str, object] = {"event": "energy", "step": self._step, "energy_j": round(found.joules, 3)}
        if found.estimated_j:
            event["estimated_j"] = round(found.estimated_j, 3)
        self._write({**event, **about, "figures": figures})
        self._read_at, self._joules, self._items = now, total, 0.0
        for note in self._meter.take_notes():
            self._warn(self._step, f"energy: {note}.")
        self._check_budget(kwh)

    def _check_budget(self, kwh: float) -> None:
        budget = self._config.energy.budget
        if budget is None or kwh < budget or self._has_paused:
            return
        self._has_paused = True
        why = (
            f"the run has used {format_energy(kwh)} of energy.budget={budget:g} kWh; to continue, add "
            f"energy.budget={max(2 * budget, 1.5 * kwh):.3g} or more"
        )
        ask(self._folder, RunRequest("hold", why, "energy.budget"))


def joules_of_earlier_starts(events: Path) -> float:
    """Return the joules in a run's event log: the last reading of each start, on all machines."""
    total, local, others = 0.0, 0.0, 0.0
    try:
        with open(events, "rb") as file:
            for line in file:
                if b'"start"' not in line and b"energy" not in line:  # parse only the few lines that matter
                    continue
                event = _event(line)
                if event.get("event") == "start":
                    total, local, others = total + local + others, 0.0, 0.0
                elif event.get("event") in ("energy", "figures"):
                    local = max(local, _finite(event.get("energy_j")))
                    others = max(others, _finite(event.get("energy_others_j")))
    except OSError:
        return total + local + others
    return total + local + others


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return event if isinstance(event, dict) else {}


def _finite(value: object) -> float:
    found = number(value)
    return found if 0 <= found < 1e18 else 0.0
