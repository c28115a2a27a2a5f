"""Rules for runs that evaluate their checkpoints in another process (`launch.evaluate_on=cpu`)."""

from __future__ import annotations

from weft.config.rules.config_rule import ConfigRule, plan_of
from weft.config.run_config import RunConfig


def _is_apart(config: RunConfig) -> bool:
    return config.launch.evaluate_on == "cpu"


def _misses_checkpoints(config: RunConfig) -> bool:
    evaluates, saves = config.eval.every, config.checkpoint.every
    return _is_apart(config) and evaluates > 0 and (saves == 0 or evaluates % saves > 0)


def _has_local_steps(config: RunConfig) -> bool:
    found = plan_of(config)
    return _is_apart(config) and found is not None and found[0].sync != "step"


#: Rules for configs with launch.evaluate_on=cpu.
EVALUATION_RULES: tuple[ConfigRule, ...] = (
    ConfigRule(
        name="cpu-evaluates-checkpoints",
        keys=("launch.evaluate_on", "eval.every", "checkpoint.every"),
        reason="Evaluation on the CPU reads checkpoints, so each evaluated step must have one.",
        predicate=_misses_checkpoints,
        message=lambda config: (
            f"cpu: it evaluates checkpoints, and checkpoint.every={config.checkpoint.every} does not save each step of "
            f"eval.every={config.eval.every}. Use checkpoint.every={config.eval.every}."
        ),
    ),
    ConfigRule(
        name="cpu-evaluation-stops-no-run",
        keys=("launch.evaluate_on", "train.early_stop.patience"),
        reason="Results from the CPU arrive at steps that depend on its speed, so a run that they stop is not "
        "repeatable.",
        predicate=lambda config: _is_apart(config) and config.train.early_stop.patience is not None,
        message=lambda config: (
            f"cpu: its results arrive while training goes on, and train.early_stop.patience="
            f"{config.train.early_stop.patience} would stop at a step that depends on the CPU's speed. Use "
            "launch.evaluate_on=ranks, or leave train.early_stop.patience out."
        ),
    ),
    ConfigRule(
        name="cpu-evaluates-one-model",
        keys=("launch.evaluate_on", "plan"),
        reason="Between synchronizations replicas have different weights, and a checkpoint has more than one model.",
        predicate=_has_local_steps,
        message=lambda config: (
            f"cpu: the plan {config.plan!r} synchronizes replicas every H steps, and a checkpoint between two "
            "synchronizations has no single model. Use launch.evaluate_on=ranks, or sync=step."
        ),
    ),
)
