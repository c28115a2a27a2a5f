"""Check that replicas have equal weights: every fiftieth step adds their checksum to the step's all-reduce.

Nothing makes replicas equal again: each applies the same gradients to its own weights. A flipped bit in the memory of
one, or an optimizer that computes differently on one machine, persists and spreads through its gradients to all of
them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.mesh import Mesh
from weft.comm.pending import LateCopy
from weft.errors import CommError
from weft.parallel.state.gradients import DataParallel

#: Steps between two checks. A check reads all masters once.
EVERY = 50
_MASK = 2**32 - 1


class ReplicaWatch:
    """Compares the master weights of ranks that must be equal.

    Args:
        engine: owner of the masters.
        mesh: the ranks.
    """

    def __init__(self, engine: DataParallel, mesh: Mesh):
        self._engine, self._mesh = engine, mesh
        plan = mesh.plan
        alike = plan.dp_replicate == 1 and plan.zero == 0 and plan.ep == 1
        self._axis = mesh["dp_shard"] if alike else mesh["dp_replicate"]
        self._steps, self._checksum = 0, 0

    def number(self) -> torch.Tensor | None:
        """Return a value whose sum over all ranks is zero if all are equal, or None in steps without a check."""
        self._steps += 1
        if self._axis.size == 1 or self._steps % EVERY:
            return None
        self._checksum = checksum(list(self._engine.local_weights().values()))
        times = 1 - self._axis.size if self._axis.rank == 0 else 1
        return torch.tensor([float(self._checksum * times)], dtype=torch.float64, device=self._mesh.device)

    def check(self, total: float) -> None:
        """Check the sum. All ranks call it.

        Raises:
            CommError: on all ranks, if weights differ. It names the ranks.
        """
        if total == 0.0:
            return
        device = self._mesh.device
        own = torch.tensor([self._checksum], dtype=torch.int64, device=device)
        found = all_gather(own, self._axis).tolist()
        (most, number), *_ = Counter(found).most_common()
        # 1: differs from the majority. 2: ranks differ and there is no majority.
        said = int(self._checksum != most) if 2 * number > len(found) else 2
        all_said = all_gather(torch.tensor([said], device=device), self._mesh.world).tolist()
        ranks = [str(rank) for rank, one in zip(self._mesh.world.ranks, all_said, strict=True) if one]
        how = "differ, and should be equal" if 2 in all_said else "differ from the others"
        raise CommError(
            f"replicas over {self._axis.label}: the weights of rank {', '.join(ranks)} {how}, since {EVERY} steps at "
            "most. Resume from an earlier checkpoint, and check the memory, the device and the software of these ranks."
        )


def checksum(tensors: list[torch.Tensor]) -> int:
    """Return a 32-bit checksum of the tensors that any flipped bit changes."""
    total = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.numel():  # an empty tensor and no tensor have the same checksum
            total = total * 31 + int(flat.view(torch.int32).sum(dtype=torch.int64))
    return total & _MASK


# Update ratio of a step: the norm of its update over the norm of the weights.

#: A rank with more elements samples about this many: all of small parameters, and short, evenly spaced runs of large
#: ones. The ratio is then a few tenths of a percent off, and sampling costs at most a thousandth of a step.
MOST_ELEMENTS = 1 << 16
#: Minimum of sampled elements of a parameter, and elements of a run, which fills memory lines.
_LEAST, _RUN = 256, 64


class UpdateRatio:
    """Measures the update ratio of one model. All ranks measure the same steps.

    Args:
        engine: owner of the model's parameters.
        device: device of the sums.
    """

    def __init__(self, engine: DataParallel, device: torch.device):
        self._engine, self._device = engine, device
        self._weights: dict[object, torch.Tensor] = {}

    def around(self, update: Callable[[], None]) -> Callable[[], float | None]:
        """Call `update` and return a function that returns its ratio, or None if all weights are zero. It may wait."""
        places = self._sampled_views()
        before = [_read(views) for _, views in places]
        update()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for (weights, views), old in zip(places, before, strict=True):
            new = _read(views)
            moved = new - old
            found = torch.stack([torch.dot(weights * moved, moved), torch.dot(weights * new, new)])
            sums += found.to(sums.device, non_blocking=True)  # from host memory, if the host steps
        told = LateCopy(all_reduce(sums, self._engine.axes.world))
        return lambda: _ratio(*told.values)

    def _sampled_views(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Return the sampled views, and the number of elements that each sampled one represents: 1-D, float64.

        One pair for each device and dtype.
        """
        held = [(one, number) for one, number in self._engine.counted_weights() if one.is_floating_point()]
        most = max(_LEAST, MOST_ELEMENTS // max(1, len(held)))
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], list[float], list[int]]] = {}
        for one, number in held:
            seen = _some(one, most)
            views, weights, counts = groups.setdefault((one.device, one.dtype), ([], [], []))
            views.append(seen)
            weights.append(one.numel() / max(1, seen.numel()) / number)
            counts.append(seen.numel())
        return [
            (self._weights_on(device, weights, counts), views)
            for (device, _), (views, weights, counts) in groups.items()
        ]

    def _weights_on(self, device: torch.device, weights: list[float], counts: list[int]) -> torch.Tensor:
        """Return one weight for each element. It is cached, because a copy from the host would wait for the device."""
        key = device, *weights, *counts
        if key not in self._weights:
            each = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
            self._weights[key] = each.to(device)
        return self._weights[key]


@torch.no_grad()
def _read(views: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([view.reshape(-1) for view in views]).double()


def _some(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a view of at most about `most` elements."""
    number = tensor.numel()
    stride = _stride(number, most)
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if stride <= 1 or span != number:  # tensors with gaps in memory are read completely
        return tensor
    return tensor.as_strided((-(-(number // _RUN) // stride), _RUN), (stride * _RUN, 1))


def _stride(num_elements: int, most: int) -> int:
    """Return the stride between sampled runs: an odd prime, so that no columns of a matrix are left out."""
    stride = -(-num_elements // most)
    while stride > 1 and any(stride % divisor == 0 for divisor in (2, *range(3, math.isqrt(stride) + 1))):
        stride += 1
    return stride


def _ratio(moved: float, weights: float) -> float | None:
    return math.sqrt(moved / weights) if weights > 0 else None
