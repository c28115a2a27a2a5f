"""Whether replicas still hold the same weights: a checksum of them travels in the totals of every fiftieth step.

Nothing makes replicas equal again: each applies the same sums to what it has. A bit that flips in the memory of one, or
an optimizer that computes otherwise on one machine, stays, and spreads through its gradients to all of them.
"""

from __future__ import annotations

from collections import Counter

import torch

from weft.comm import all_gather
from weft.errors import CommError
from weft.mesh import Mesh
from weft.parallel.placement import DataParallel

#: Steps from one look to the next: a look reads all masters once.
EVERY = 50
_MASK = 2**32 - 1


class ReplicaWatch:
    """Compares the masters of ranks that must hold the same.

    Args:
        engine: holds them.
        mesh: of the ranks.
    """

    def __init__(self, engine: DataParallel, mesh: Mesh):
        self._engine, self._mesh = engine, mesh
        plan = mesh.plan
        alike = plan.dp_replicate == 1 and plan.zero == 0 and plan.ep == 1
        self._axis = mesh["dp_shard"] if alike else mesh["dp_replicate"]
        self._steps, self._checksum = 0, 0

    def number(self) -> torch.Tensor | None:
        """Return what to add up over all ranks: zero where all are equal. None in most steps, on all ranks alike."""
        self._steps += 1
        if self._axis.size == 1 or self._steps % EVERY:
            return None
        self._checksum = checksum(list(self._engine.held_weights().values()))
        times = 1 - self._axis.size if self._axis.rank == 0 else 1
        return torch.tensor([float(self._checksum * times)], dtype=torch.float64, device=self._mesh.device)

    def check(self, total: float) -> None:
        """Look at the sum. All ranks call it.

        Raises:
            CommError: on all ranks, where some hold other weights: names them.
        """
        if total == 0.0:
            return
        device = self._mesh.device
        own = torch.tensor([self._checksum], dtype=torch.int64, device=device)
        found = all_gather(own, self._axis).tolist()
        (most, number), *_ = Counter(found).most_common()
        # 1: another than most. 2: one of those that differ, of which nobody knows which is right.
        said = int(self._checksum != most) if 2 * number > len(found) else 2
        all_said = all_gather(torch.tensor([said], device=device), self._mesh.world).tolist()
        ranks = [str(rank) for rank, one in zip(self._mesh.world.ranks, all_said, strict=True) if one]
        how = "differ, and should be equal" if 2 in all_said else "are no longer those of the others"
        raise CommError(
            f"replicas over {self._axis.label}: the weights of rank {', '.join(ranks)} {how}, since {EVERY} steps at "
            "most. Resume from an earlier checkpoint, and check the memory, the device and the software of these ranks."
        )


def checksum(tensors: list[torch.Tensor]) -> int:
    """Return 32 bits that any change of a bit in the tensors changes."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.numel():  # a tensor without elements, or none at all, is the same
            total = total * 31 + int(flat.view(torch.int32).sum(dtype=torch.int64))
    return total & _MASK
