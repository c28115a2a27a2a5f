"""A check in the first step for results that depend on how the plan divides a batch."""

from __future__ import annotations

from weft.train.batch_check.check import Probed, causes_of, check_first_batch

__all__ = ["Probed", "causes_of", "check_first_batch"]
