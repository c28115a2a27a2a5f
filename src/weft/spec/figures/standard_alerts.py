"""The ready set of alerts, `alerts = "standard"`: what every run should hear of, quiet on runs that are well.

Each bound leaves room for what healthy runs do; tests hold the set to 50 of them without one alarm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "warning", "critical"]


@dataclass(frozen=True, slots=True)
class StandardAlert:
    """One of the set. says: what a person may do about it. after_step: steps that are let pass before."""

    name: str
    when: str
    severity: Severity
    says: str
    after_step: int = 0


STANDARD: tuple[StandardAlert, ...] = (
    StandardAlert(
        "loss-not-finite", "loss is not finite or eval.loss is not finite", "critical",
        "Lower optimizer.lr, or go back with `weft ask RUN roll_back`.",
    ),
    StandardAlert(
        "loss-spike", "loss > 8 sigma over 200 steps for 3 steps and loss > 1.1 of median over 200 steps for 3 steps "
        "and loss > 0.001",
        "warning", "If it stays high, go back with `weft ask RUN skip_data`, or lower optimizer.lr.", 50,
    ),
    StandardAlert(
        "gradient-not-finite", "grad_norm is not finite for 3 steps", "critical",
        "Lower optimizer.lr or optimizer.max_grad_norm, or use bf16.",
    ),
    StandardAlert(
        "no-progress", "eval.loss no better for 10 evaluations", "warning",
        "The evaluation loss no longer falls: stop, lower optimizer.lr, or use more data.",
    ),
    StandardAlert(
        "slow-rank", "rank.lag > 1.15 for 30s", "warning",
        "All ranks wait for this one: look at its GPU's clock and temperature, and at other programs there.",
    ),
    StandardAlert(
        "slower", "tokens_per_s < 0.7 of median over 500 steps for 2m", "warning",
        "Look for other programs, a slow disk or a hot GPU.", 100,
    ),
    StandardAlert(
        "stalled", "no step for 10m", "critical",
        "Weft names who holds the ranks up after launch.warn_after; `logs/` has their stacks.",
    ),
    StandardAlert(
        "rank-silent", "rank.silent > 0 for 1m", "warning", "Its process may be stopped or its machine lost.",
    ),
    StandardAlert(
        "memory-leak", "process.memory_bytes rises by 25% over 30m", "warning",
        "Something keeps growing on the host: a list of tensors, a cache, workers of a data loader.", 100,
    ),
    StandardAlert(
        "memory-short", "host.memory_free_bytes < 1GiB for 30s", "critical", "The kernel may kill a rank soon.",
    ),
    StandardAlert(
        "disk-short", "disk.free < 5GiB", "critical",
        "Saves will fail: delete old checkpoints, or lower checkpoint.keep.",
    ),
    StandardAlert("gpu-hot", "gpu.temperature > 90 for 60s", "warning", "Look at its cooling; its clock will fall."),
    StandardAlert(
        "gpu-throttled", "gpu.throttled > 0 for 60s", "warning", "Heat or the power brake slows this GPU down.",
    ),
    StandardAlert(
        "gpu-error", "gpu.xid_errors > 0 or gpu.ecc_errors > 0", "critical", "Drain this machine and test its GPU.",
    ),
    StandardAlert("failure", "event failure", "critical", "The log of the rank that failed says why."),
    StandardAlert("held", "event held", "warning", "Look at it, and let it go on: weft resume RUN."),
)  # fmt: skip
