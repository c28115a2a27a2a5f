"""Ranks of `weft train` that sleep for each sample, so that their speeds are known and need no CPU.

`optimizer.name=tests.train.slow_ranks:SleepyAdamW` imports this module on every rank. SLEEP has the seconds per sample
of each rank, such as "0.01,0.03". A value with a step, such as "0.01@20:0.03", changes after that many forwards.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from weft.train.batches.microbatches import samples_in
from weft.train.step.passes import Accumulate

SLEEP = "WEFT_TEST_SLEEP"

_plain = Accumulate.with_labels
_forwards = 0


def seconds_per_sample() -> float:
    of_ranks = os.environ.get(SLEEP, "0").split(",")
    own = of_ranks[int(os.environ.get("RANK", "0")) % len(of_ranks)]
    first, _, later = own.partition("@")
    after, _, then = later.partition(":")
    return float(then if later and _forwards > int(after) else first)


def _sleeping(self: Accumulate, model: torch.nn.Module, microbatch: Any) -> Any:
    global _forwards
    if torch.is_grad_enabled():
        _forwards += 1
        time.sleep(samples_in(microbatch) * seconds_per_sample())
    return _plain(self, model, microbatch)


Accumulate.with_labels = _sleeping


class SleepyAdamW(torch.optim.AdamW):
    """AdamW on a rank that sleeps."""
