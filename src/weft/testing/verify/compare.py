"""When two trainings count as equal: tolerances by number format, and the difference of each tensor.

| dtype | loss | grad norm | gradients, weights | measure of a tensor |
|---|---|---|---|---|
| float64 | 1e-10 | 1e-10 | 1e-10 | largest difference / largest value |
| float32 | 1e-5 | 1e-4 | 1e-3 | the same |
| bfloat16 | 2^-5 | 2^-5 | 2^-3 | mean difference / largest value |
| float16 | 2^-8 | 2^-8 | 2^-5 | the same |

Ranks split a batch, so sums are made in another order: float64 leaves no room for anything else. The reference of the
half formats is one process of Weft in that format, of the others PyTorch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.testing.parity import ParityResult


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest relative differences that count as equal. by_mean: of a tensor, the mean difference is looked at."""

    loss: float
    grad_norm: float
    tensor: float
    by_mean: bool = False


TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-10, 1e-10),
    "float32": Tolerance(1e-5, 1e-4, 1e-3),
    "bfloat16": Tolerance(2**-5, 2**-5, 2**-3, by_mean=True),
    "float16": Tolerance(2**-8, 2**-8, 2**-5, by_mean=True),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One number or tensor that was compared. what: "loss", "grad norm", "gradient" or "weight"; relative: its
    difference as a share of its scale; limit: the largest that counts as equal."""

    what: str
    name: str
    relative: float
    limit: float

    @property
    def is_equal(self) -> bool:
        return self.relative <= self.limit  # a NaN is not


def number_differences(
    ours: ParityResult, losses: Sequence[float], grad_norms: Sequence[float], tolerance: Tolerance
) -> Iterator[Difference]:
    """Losses and gradient norms, step by step."""
    for what, mine, other, limit in (
        ("loss", ours.losses, losses, tolerance.loss),
        ("grad norm", ours.grad_norms, grad_norms, tolerance.grad_norm),
    ):
        for step, (left, right) in enumerate(zip(mine, other, strict=True), 1):
            # Equal infinities and NaN of both are equal: the plan did what one process does.
            same = left == right or (left != left and right != right)
            yield Difference(what, f"step {step}", 0.0 if same else abs(left - right) / max(abs(right), 1e-300), limit)


def tensor_difference(
    what: str, name: str, ours: torch.Tensor, theirs: torch.Tensor | None, least: float, tolerance: Tolerance
) -> Difference:
    """One whole gradient or weight. least: its scale is no smaller, see `ParityResult.least_scales`."""
    if theirs is None or ours.shape != theirs.shape:
        return Difference(what, name, float("inf"), tolerance.tensor)
    if not theirs.numel():
        return Difference(what, name, 0.0, tolerance.tensor)
    apart = (ours.detach().to(theirs) - theirs).abs()
    found = float(apart.mean() if tolerance.by_mean else apart.max())
    return Difference(what, name, found / max(float(theirs.abs().max()), least, 1e-300), tolerance.tensor)
