"""How far a step moved the weights: the norm of its update over the norm of the weights.

Weights are looked at before and after the update, so that any optimizer is measured, with whatever its rules, masks and
rounding made of the gradient. Each element counts once, whoever else holds it. The sums stay on the device until the
metrics of the step are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from weft.comm import LateCopy, all_reduce
from weft.parallel import DataParallel

#: A rank with more elements looks at about so many: at all of small parameters, and at short runs of large ones, evenly
#: spread. The ratio is then a few tenths of a percent off, and looking costs a thousandth of a step or less.
MOST_ELEMENTS = 1 << 16
#: Elements of a parameter that are looked at in any case, and of a run: memory is read by the line.
_LEAST, _RUN = 256, 64


class UpdateRatio:
    """Measures updates of one model; all ranks measure the same steps.

    Args:
        engine: of the model's parameters.
        device: that the sums are wanted on.
    """

    def __init__(self, engine: DataParallel, device: torch.device):
        self._engine, self._device = engine, device
        self._weights: dict[object, torch.Tensor] = {}

    def around(self, update: Callable[[], None]) -> Callable[[], float | None]:
        """Let a step's update happen. Returns what gives its ratio, None where all weights are zero; this may wait."""
        places = self._places()
        before = [_read(views) for _, views in places]
        update()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for (weights, views), old in zip(places, before, strict=True):
            new = _read(views)
            moved = new - old
            found = torch.stack([torch.dot(weights * moved, moved), torch.dot(weights * new, new)])
            sums += found.to(sums.device, non_blocking=True)  # from the memory of a host that steps
        told = LateCopy(all_reduce(sums, self._engine.axes.world))
        return lambda: _ratio(*told.values)

    def _places(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Views of what is looked at, and how many elements of the model each element there stands for: 1-D, float64.

        One pair for each device and format.
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
        """One for each element. Kept, because a copy from the host would wait for the device."""
        key = device, *weights, *counts
        if key not in self._weights:
            each = torch.tensor(weights, dtype=torch.float64).repeat_interleave(torch.tensor(counts))
            self._weights[key] = each.to(device)
        return self._weights[key]


@torch.no_grad()
def _read(views: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([view.reshape(-1) for view in views]).double()


def _some(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a view of at most about so many of its elements."""
    number = tensor.numel()
    stride = _stride(number, most)
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if stride <= 1 or span != number:  # what has gaps in memory is looked at whole
        return tensor
    return tensor.as_strided((-(-(number // _RUN) // stride), _RUN), (stride * _RUN, 1))


def _stride(num_elements: int, most: int) -> int:
    """A step from one run that is seen to the next: an odd prime, so that no columns of a matrix are left out."""
    stride = -(-num_elements // most)
    while stride > 1 and any(stride % divisor == 0 for divisor in (2, *range(3, math.isqrt(stride) + 1))):
        stride += 1
    return stride


def _ratio(moved: float, weights: float) -> float | None:
    return math.sqrt(moved / weights) if weights > 0 else None
