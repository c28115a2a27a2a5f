"""Agreement of ranks that generate with one model: which tokens were chosen, and when all are done."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from weft.comm.collectives import all_reduce, broadcast
from weft.comm.mesh import Axis, Mesh


class Together(Protocol):
    """Ranks that share a model's weights."""

    def any_busy(self, busy: bool) -> bool:
        """Return True if any rank has texts to continue, so that all of them run a forward."""
        ...

    def agree(self, ids_B: Tensor, log_probs_B: Tensor) -> tuple[list[int], list[float]]:
        """Return the same ids and log probabilities on all ranks that compute these rows."""
        ...


class Alone:
    """A model that no other rank shares."""

    def any_busy(self, busy: bool) -> bool:
        """Return `busy`."""
        return busy

    def agree(self, ids_B: Tensor, log_probs_B: Tensor) -> tuple[list[int], list[float]]:
        """Return the arguments as lists."""
        return ids_B.tolist(), log_probs_B.tolist()


class MeshRanks:
    """Ranks of a mesh. Ranks along tp and pp compute the same rows, and data ranks different ones.

    Args:
        mesh: the mesh of the model's plan.
    """

    def __init__(self, mesh: Mesh):
        plan = mesh.plan
        self._device = mesh.device
        self._same: Axis | None = mesh["tp", "pp"] if plan.tp * plan.pp > 1 else None
        # Without shared weights each data rank runs on its own.
        shares = plan.zero == 3 or plan.ep > 1
        self._others: Axis | None = mesh.data if shares and mesh.data.size > 1 else None

    def any_busy(self, busy: bool) -> bool:
        """Return True if any data rank that shares weights is busy."""
        if self._others is None:
            return busy
        return bool(all_reduce(torch.tensor([int(busy)], device=self._device), self._others, "max")[0])

    def agree(self, ids_B: Tensor, log_probs_B: Tensor) -> tuple[list[int], list[float]]:
        """Return the first rank's ids and log probabilities. Rounding may differ between ranks."""
        if self._same is None:
            return ids_B.tolist(), log_probs_B.tolist()
        both = broadcast(torch.stack([ids_B.double(), log_probs_B.double()]), self._same)
        return [int(token) for token in both[0].tolist()], both[1].tolist()
