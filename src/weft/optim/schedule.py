"""Learning rate over the steps of a run as a pure function, without state to save or resume."""

from __future__ import annotations

import math

from weft.config.sections import ScheduleSection


def lr_factor(step: int, num_steps: int, schedule: ScheduleSection) -> float:
    """Return the factor on the peak learning rate.

    Warm-up rises linearly and reaches 1 after `warmup_steps` steps. constant then stays at 1. linear and cosine fall to
    `final` at the last step. wsd (warmup-stable-decay, Hu et al. 2024, arXiv 2404.06395) stays at 1 and falls linearly
    to `final` over its last `decay_steps`.

    Args:
        step: index of the step, from 0.
        num_steps: steps of the full run.
        schedule: the schedule's settings.
    """
    start = schedule.warmup(num_steps)
    if step < start:
        return (step + 1) / start
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "wsd":
        start = max(start, num_steps - schedule.decay(num_steps))
        if step < start:
            return 1.0
    # Progress is 1 at the last step, num_steps - 1.
    progress = min(1.0, (step - start + 1) / max(1, num_steps - start))
    if schedule.kind == "cosine":
        return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (1 - schedule.final) * progress
