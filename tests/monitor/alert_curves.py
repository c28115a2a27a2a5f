"""Synthetic event logs for tests of alerts: healthy runs of many kinds, and runs with a fault."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.config.run_config import RunConfig
from weft.monitor.alerts import AlertDesk, rules_of

#: The fault kinds, and the standard alert that must find each.
FAULTS = {
    "spike": "loss-spike",
    "plateau": "no-progress",
    "nan": "loss-not-finite",
    "slow rank": "slow-rank",
    "leak": "memory-leak",
}
#: Further alerts that a fault may rightly raise.
ALSO = {"nan": ("gradient-not-finite", "no-progress")}
#: A fault must be found within this number of steps. A plateau: 36 evaluations, of which the last 10 are no better.
#: Noise alone gives a new best value now and then.
FOUND_WITHIN = {"spike": 5, "plateau": 36 * 50, "nan": 1, "slow rank": 90, "leak": 3100}
#: Seeds of the evaluated runs: 40 of each fault, and healthy ones.
FAULTY, HEALTHY = range(1000, 1200), range(5000, 5050)


@dataclass
class SyntheticRun:
    """A synthetic run. `begin` is the first step of the fault."""

    seed: int
    fault: str = ""
    steps: int = 0
    begin: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        draw = self._random.uniform
        # A leak and a plateau show slowly.
        self.steps = self.steps or {"plateau": 2800, "leak": 4500}.get(self.fault, 1500)
        self.begin = round(draw(0.3, 0.5) * 1200) if self.fault else 0
        self.step_s = draw(0.5, 1.0)
        self.low, self.fall, self.tau = draw(0.5, 3.5), draw(1.0, 8.0), draw(100, 800)
        self.noise = draw(0.005, 0.06)
        self.heavy_tailed = self._random.random() < 0.3
        self.cycle = draw(0.0, 0.03)
        self.num_ranks = self._random.choice([1, 4, 8]) if self.fault != "slow rank" else 8

    def loss(self, step: int) -> float:
        """Return a healthy run's loss, with normal or heavy-tailed noise and a slow wave."""
        at = step if self.fault != "plateau" else min(step, self.begin)
        mean = self.low + self.fall * math.exp(-at / self.tau) - 0.0001 * at
        wave = self.cycle * math.sin(step / 40)
        noise = self._random.gauss(0, self.noise)
        if self.heavy_tailed and self._random.random() < 0.02:
            noise *= 2.5
        return mean * (1 + wave + noise)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the run's events in order."""
        draw, now = self._random, 1_000_000.0
        yield {"event": "start", "time": now, "step": 0}
        for step in range(1, self.steps + 1):
            now += self.step_s * draw.uniform(0.95, 1.08)
            loss, norm = self.loss(step), abs(draw.gauss(1, 0.2)) + 0.1
            since = step - self.begin
            if self.fault == "spike" and 0 <= since < 40:
                loss += 0.4 * (loss - 0.3) + 8 * self.noise * loss
            if self.fault == "nan" and since >= 0:
                loss = norm = math.nan
            event = {"event": "step", "time": now, "step": step, "loss": loss, "grad_norm": norm, "lr": 1e-3}
            speed = 1000 * draw.uniform(0.93, 1.03)
            event |= {"tokens_per_s": speed, "seconds": {"total": self.step_s}}
            yield {key: "nan" if isinstance(one, float) and math.isnan(one) else one for key, one in event.items()}
            if step % 50 == 0:
                value = self._evaluated(step, since)
                yield {"event": "eval", "time": now, "step": step, "loss": "nan" if math.isnan(value) else value}
            if step % 10 == 0:
                yield self._metrics(step, since, now)
            if step % 300 == 0:
                now += draw.uniform(1, 30)  # a save that training waited for
                yield {"event": "checkpoint", "time": now, "step": step, "stall_s": 1.0, "durable_s": 2.0}
        yield {"event": "end", "time": now, "step": self.steps, "reason": "finished"}

    def _evaluated(self, step: int, since: int) -> float:
        """Return an evaluation's loss. On a plateau it stays constant except for noise."""
        if self.fault == "nan" and since >= 0:
            return math.nan
        at = min(step, self.begin) if self.fault == "plateau" else step
        return self.low + self.fall * math.exp(-at / self.tau) - 0.0004 * at + self._random.gauss(0, 0.002)

    def _metrics(self, step: int, since: int, now: float) -> dict[str, Any]:
        draw = self._random
        lag = max(draw.uniform(1.0, 1.07) for _ in range(self.num_ranks))
        if self.fault == "slow rank" and since >= 0:
            lag = draw.uniform(1.18, 1.26)
        memory = 2e9 * (1 + 0.1 * min(1.0, step / 100)) * draw.uniform(0.99, 1.01)
        if self.fault == "leak" and since >= 0:
            memory *= 1 + since * 2.5e-4
        metrics: dict[str, Any] = {"process.memory_bytes": [memory * 0.9, memory, memory, "rank 0", "rank 1"]}
        metrics |= {"rank.silent": 0, "disk.free_bytes": [9e11, 9e11, 9e11, "a", "a"]}
        metrics |= {
            "host.memory_free_bytes": [6e10, 6e10, 6e10, "a", "a"],
            "gpu.temperature": [60, 66, 79, "rank 0", "rank 2"],
        }
        if self.num_ranks > 1:
            metrics["rank.lag"] = [0.97, 1.0, lag, "rank 0", "rank 5"]
        return {"event": "figures", "time": now, "step": step, "ranks": self.num_ranks, "figures": metrics}


@dataclass
class Score:
    """Result of evaluating a set of alerts.

    right, wrong: number of alarms. found, late: faults found within their window or not. lags: delays in steps.
    messages: descriptions of wrong alarms and late faults.
    """

    right: int = 0
    wrong: int = 0
    found: int = 0
    late: int = 0
    num_clean: int = 0
    lags: dict[str, list[int]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def precision(self) -> float:
        """Share of alarms that were right."""
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        """Share of faults that were found within their window."""
        return self.found / max(1, self.found + self.late)

    def add(self, run: SyntheticRun) -> None:
        """Evaluate the standard set on one run."""
        desk = AlertDesk(rules_of(RunConfig(alerts="standard")))
        fired = [(notice.rule.name, notice.step or 0) for event in run.events() for notice in desk.see(event)
                 if notice.state == "fired"]  # fmt: skip
        fault = run.fault
        rightly = (FAULTS[fault], *ALSO.get(fault, ())) if fault else ()
        for name, at in fired:
            is_right = name in rightly and at >= run.begin
            self.right, self.wrong = self.right + is_right, self.wrong + (not is_right)
            if not is_right:
                self.messages.append(f"seed {run.seed}, {fault or 'healthy'} from step {run.begin}: {name} at {at}")
        if not fault:
            self.num_clean += 1
            return
        lag = next((at - run.begin for name, at in fired if name == FAULTS[fault] and at >= run.begin), None)
        is_found = lag is not None and lag <= FOUND_WITHIN[fault] + 1
        self.found, self.late = self.found + is_found, self.late + (not is_found)
        if lag is not None:
            self.lags.setdefault(fault, []).append(lag)
        if not is_found:
            self.messages.append(f"seed {run.seed}, {fault} from step {run.begin}: found after {lag} steps")


def scored() -> Score:
    """Return the standard set's score on 200 runs with a fault and 50 without."""
    score, kinds = Score(), [*FAULTS]
    for seed in FAULTY:
        score.add(SyntheticRun(seed, kinds[seed % len(kinds)]))
    for seed in HEALTHY:
        score.add(SyntheticRun(seed, steps=2000))
    return score
