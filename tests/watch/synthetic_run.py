"""Event logs of synthetic runs: long ones on many ranks, for the page and its charts."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class SyntheticRun:
    """What happens in the run.

    slow_rank: takes a fifth longer from slow_from on. fails_at: step at which a rank fails once.
    """

    steps: int = 2000
    ranks: int = 16
    step_s: float = 0.5
    seed: int = 1
    slow_rank: int | None = None
    slow_from: int = 0
    fails_at: int | None = None
    spike_at: int | None = None
    eval_every: int = 100
    save_every: int = 250
    figures_every: int = 20
    until: int | None = None
    lr: float = 6e-4
    gpu: bool = True
    planned: bool = True
    end: float = field(default_factory=time.time)

    def write(self, folder: Path) -> Path:
        """Write the folder's events.jsonl, and return the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "events.jsonl", "w", encoding="utf-8") as file:
            for event in self.events(folder.name):
                file.write(json.dumps(event, separators=(",", ":")) + "\n")
        return folder

    def events(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield all events in order."""
        rng = random.Random(self.seed)
        last = self.until or self.steps
        now = self.end - last * self.step_s * 1.12
        yield self._start(name, 0, now)
        if self.planned:
            yield self._plan(now)
        now += 21.0
        step, failed = 0, False
        while step < last:
            step += 1
            took = self.step_s * (1 + 0.02 * rng.random()) * (1.07 if self._is_slow(step) else 1.0)
            took += 9.0 if step == 1 else 0.0
            now += took + 0.004
            yield self._step(step, now, took, rng)
            if step % self.figures_every == 0:
                yield self._metrics(step, now, rng)
            if self.planned and step % 500 == 0:
                yield self._actual(step, now)
            if step == self.spike_at:
                yield {
                    "time": now,
                    "event": "warning",
                    "step": step,
                    "text": f"step {step}: the loss jumped to 6.91; 3.42 is typical of recent steps.",
                }
            if step == self.slow_from and self.slow_rank is not None:
                yield {
                    "time": now + 30,
                    "event": "alert",
                    "name": "slow rank",
                    "severity": "warning",
                    "step": step + 60,
                    "text": f"rank {self.slow_rank} is busy 1.21 x the median rank for 60 steps",
                }
            if step % self.eval_every == 0 or step == last:
                now += 6 * self.step_s
                loss = self._loss(step, rng) + 0.06
                yield {
                    "time": now,
                    "event": "eval",
                    "step": step,
                    "loss": loss,
                    "bits_per_byte": loss / 2.57,
                    "tokens": 65536,
                }
            if step % self.save_every == 0:
                yield {
                    "time": now + 0.4,
                    "event": "checkpoint",
                    "step": step,
                    "path": f"step_{step:08d}",
                    "stall_s": 0.41,
                    "durable_s": 6.2,
                }
                now += 0.4
            if step == self.fails_at and not failed:
                failed = True
                yield {
                    "time": now + 4,
                    "event": "failure",
                    "cause": "died",
                    "rank": 5,
                    "at_step": step,
                    "text": "rank 5 died (signal 9, out of memory on the host?)",
                }
                now += 48.0
                step = step // self.save_every * self.save_every
                yield {"time": now, "event": "resume", "step": step}
                yield self._start(name, step, now)
                if self.planned:
                    yield self._plan(now)
                now += 14.0
        if last == self.steps:
            yield {"time": now + 0.5, "event": "end", "step": step, "reason": "finished"}

    def _start(self, name: str, step: int, now: float) -> dict[str, Any]:
        config = {
            "run": {"name": name, "dir": "runs"},
            "model": {"name": "llama-1b"},
            "optimizer": {"name": "adamw", "lr": self.lr},
            "train": {"steps": self.steps, "global_batch": 256, "seq_len": 4096},
            "checkpoint": {"every": self.save_every},
            "eval": {"every": self.eval_every},
            "log": {"api_token": "planted-secret"},
        }
        return {
            "time": now,
            "event": "start",
            "step": step,
            "model": "llama-1b: 1.24 B parameters",
            "plan": f"dp_shard={max(1, self.ranks // 2)} tp=2 zero=2 recompute=selective compile=on",
            "world_size": self.ranks,
            "device": "cuda" if self.gpu else "cpu",
            "weft": "0.1.0",
            "torch": "2.13.0",
            "python": "3.11.7",
            "config": config,
            "machine": {"host": "node-07", "cores": 96, "gpus": "8 x H100"},
        }

    def _plan(self, now: float) -> dict[str, Any]:
        total = self.step_s * 0.98
        return {
            "time": now,
            "event": "plan",
            "basis": "tables of H100",
            "step_s": total,
            "memory_bytes": 46 * 2**30,
            "parts": {
                "compute": total * 0.76,
                "over tp": total * 0.12,
                "over dp": total * 0.06,
                "optimizer": total * 0.05,
            },
            "figures": {"step_s": total, "tokens_per_s": 2**20 / total, "memory.bytes": 46 * 2**30},
        }

    def _actual(self, step: int, now: float) -> dict[str, Any]:
        total, slow = self.step_s * 1.01, self._is_slow(step)
        parts = {
            "compute": total * 0.75,
            "over tp": total * 0.12,
            "over dp": total * (0.13 if slow else 0.062),
            "optimizer": total * 0.05,
            "data": total * 0.003,
        }
        return {
            "time": now,
            "event": "actual",
            "step": step,
            "steps": 200,
            "step_s": sum(parts.values()),
            "parts": parts,
            "memory_bytes": 44 * 2**30,
            "drift": ["over dp takes 2.2 x what was planned (64.6 ms, planned 29.4 ms)."] if slow else [],
        }

    def _step(self, step: int, now: float, took: float, rng: random.Random) -> dict[str, Any]:
        first = 9.0 if step == 1 else 0.0
        inside = took - first
        parts = {
            "data": 0.003 * inside,
            "forward": 0.27 * inside + first,
            "backward": 0.55 * inside,
            "reduce": 0.06 * inside,
            "optimizer": 0.05 * inside,
        }
        warm = min(1.0, step / max(1, self.steps // 50))
        return {
            "time": round(now, 3),
            "event": "step",
            "step": step,
            "loss": self._loss(step, rng),
            "lr": self.lr * warm * (0.55 + 0.45 * math.cos(math.pi * step / self.steps)),
            "grad_norm": math.exp(rng.gauss(-0.2, 0.18)) * (1 + 4 * math.exp(-step / (self.steps / 60))),
            **({"update_ratio": 0.002 / (1 + 4 * step / self.steps)} if step % 10 == 0 else {}),
            "tokens": 2**20,
            "tokens_per_s": 2**20 / took,
            "mfu": 0.43 * self.step_s / took,
            "seconds": {**{name: round(one, 6) for name, one in parts.items()}, "total": round(took, 6)},
            "memory_bytes": 44 * 2**30,
        }

    def _loss(self, step: int, rng: random.Random) -> float:
        share = step / self.steps
        loss = (
            2.9 + 7.6 * math.exp(-share * 34) + 1.5 * math.exp(-share * 4.2) * (1 + self.lr * 60) + rng.gauss(0, 0.045)
        )
        if self.spike_at is not None and 0 <= step - self.spike_at < self.steps // 40:
            loss += 3.4 * math.exp(-(step - self.spike_at) / (self.steps / 140))
        return loss

    def _metrics(self, step: int, now: float, rng: random.Random) -> dict[str, Any]:
        base = self.step_s * 0.8
        busy = [
            round(
                base * (1 + rng.gauss(0, 0.012) + 0.01 * math.sin(rank)) * (1.21 if self._is_slow(step, rank) else 1.0),
                5,
            )
            for rank in range(self.ranks)
        ]
        far = self.ranks - 1

        def fold(middle: float, spread: float) -> list[object]:
            middle *= 1 + rng.gauss(0, 0.01)
            return [middle * (1 - spread), middle, middle * (1 + spread), "rank 2", f"rank {min(7, far)}"]

        metrics: dict[str, object] = {
            "memory.bytes{weights}": fold(2.4 * 2**30, 0),
            "memory.bytes{gradients}": fold(2.4 * 2**30, 0),
            "memory.bytes{optimizer}": fold(7.2 * 2**30, 0),
            "memory.bytes{rest}": fold(32 * 2**30, 0.03),
            "memory.bytes{peak}": fold(44 * 2**30, 0.02),
            "host.cpu": fold(0.31, 0.1),
            "process.cpu": fold(1.1, 0.1),
            "disk.free_bytes": fold(3.1 * 2**40, 0),
            "net.sent_bytes_per_s": fold(5.2e9, 0.2),
            "process.memory_bytes": fold(6.1 * 2**30, 0.05),
        }
        if self.gpu:
            metrics |= {
                "gpu.utilization": fold(0.94, 0.04),
                "gpu.memory_bytes": fold(52 * 2**30, 0.02),
                "gpu.power": fold(610, 0.07),
                "gpu.temperature": fold(62, 0.12),
            }
        return {"time": now, "event": "figures", "step": step, "figures": metrics, "by_rank": {"busy_s": busy}}

    def _is_slow(self, step: int, rank: int | None = None) -> bool:
        if self.slow_rank is None or step < self.slow_from:
            return False
        return rank is None or rank == self.slow_rank
