"""train.epochs as train.steps, once the data is known."""

from __future__ import annotations

import math
from dataclasses import replace

from weft.data import PreparedData, SampleStream
from weft.errors import ConfigError
from weft.spec import RunConfig
from weft.spec.rules import config_problems


def with_steps(config: RunConfig, data: PreparedData) -> tuple[RunConfig, PreparedData]:
    """The config with the steps that its epochs take, and the data whose summary tells them; both as they are without.

    Raises ConfigError where the steps break a rule between settings, such as a warm-up that is longer.
    """
    epochs = config.train.epochs
    if epochs is None:
        return config, data
    sequences = SampleStream(
        data.train, seed=config.seed, seq_len=config.train.seq_len, packing=config.data.packing,
        borders=config.data.borders,
    ).num_sequences  # fmt: skip
    steps = max(1, math.ceil(epochs * sequences / config.train.global_batch))
    # From here on the steps alone count: what is resumed with more of them is not asked for its epochs again.
    train = config.train.model_copy(update={"steps": steps, "epochs": None})
    config = config.model_copy(update={"train": train})
    told = f"train.epochs={epochs:g}: {sequences} sequences an epoch, {config.train.global_batch} a step: {steps} steps"
    problems = config_problems(config)
    if problems:
        raise ConfigError(problems)
    return config, replace(data, summary=[*data.summary, told])
