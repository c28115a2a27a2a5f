"""What a step of all replicas says of itself where each trains by itself: some bytes, which travel during the update.

All ranks judge a run by the same numbers: when it stops, what it saves, and whether a loss went wrong.
"""

from __future__ import annotations

import torch

from weft.comm import start_all_reduce
from weft.parallel.zero import RareSync
from weft.train.step.step_metrics import StepMetrics


class JointNumbers:
    """The replicas' metrics of one step on their way. All ranks make it and ask for `metrics` at the same place.

    Args:
        own: of this rank's replica.
        sync: of the replicas.
    """

    def __init__(self, own: StepMetrics, sync: RareSync):
        self._own, self._replicas = own, sync.replicas
        loss_sum = own.loss * own.num_tokens if own.num_tokens else 0.0
        numbers = [loss_sum, own.num_tokens, own.grad_norm, own.skipped is not None, own.wants_stop]
        axis = sync.mesh["dp_replicate"]
        sums = torch.tensor(list(map(float, numbers)), dtype=torch.float64, device=sync.mesh.device)
        self._pending = start_all_reduce(sums, axis)

    def metrics(self) -> StepMetrics:
        """Return those of all: the loss over all tokens, and the mean of the replicas' norms."""
        loss_sum, num_tokens, norms, skipped, stops = self._pending.wait().tolist()
        why = None
        if skipped:
            why = f"{skipped:.0f} of {self._replicas} replicas left it out"
            why += f", this one for: {self._own.skipped}" if self._own.skipped else ""
        return StepMetrics(
            loss_sum / max(num_tokens, 1.0),
            norms / self._replicas,
            round(num_tokens),
            self._own.loss_scale,
            why,
            stops > 0,
        )
