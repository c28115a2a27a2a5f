"""train.epochs as train.steps, once the data is known."""

from __future__ import annotations

import math

from weft.errors import ConfigError
from weft.spec import RunConfig
from weft.spec.rules import config_problems
from weft.train.task import Task


def with_steps(config: RunConfig, task: Task) -> tuple[RunConfig, list[str]]:
    """The config with the steps that its epochs take, and a line that tells them; without epochs the config as it is.

    task: its data is ready. Raises ConfigError where the steps break a rule between settings, such as a warm-up that
    is longer.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config, []
    num_samples = task.samples_per_epoch()
    steps = task.places().step_at(max(1, math.ceil(epochs * num_samples)) - 1) + 1
    # From here on the steps alone count: what is resumed with more of them is not asked for its epochs again.
    train = config.train.model_copy(update={"steps": steps, "epochs": None})
    config = config.model_copy(update={"train": train})
    problems = config_problems(config)
    if problems:
        raise ConfigError(problems)
    most = config.train.global_cost
    a_step = config.train.global_batch if most is None else f"a cost of {most:g}"
    told = f"train.epochs={epochs:g}: {num_samples} {task.sample_unit} an epoch, {a_step} a step: {steps} steps"
    return config, [told]
