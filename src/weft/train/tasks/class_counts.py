"""Counts that evaluations sum over batches and ranks, and the scores computed from them: accuracy, F1, correlation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

_KINDS = ("hit", "said", "true")


def class_sum_names(num_classes: int) -> tuple[str, ...]:
    """Return the names of the results of `class_sums`."""
    return tuple(f"{kind}_{index}" for kind in _KINDS for index in range(num_classes))


def class_sums(said: torch.Tensor, labels: torch.Tensor, num_classes: int) -> dict[str, torch.Tensor]:
    """Count the correct, predicted and true samples of each class.

    Args:
        said: int64, the predicted classes.
        labels: int64, of the same shape; values below 0 are not counted.
        num_classes: number of classes.
    """
    counts = labels >= 0
    said, labels = said[counts], labels[counts]
    found = [torch.bincount(one, minlength=num_classes) for one in (labels[said == labels], said, labels)]
    names = class_sum_names(num_classes)
    return dict(zip(names, torch.cat(found), strict=True))


def accuracy(sums: Mapping[str, float], num_classes: int) -> float | None:
    """Return the share of correct predictions, or None if nothing was counted."""
    number = sum(sums[f"true_{index}"] for index in range(num_classes))
    return sum(sums[f"hit_{index}"] for index in range(num_classes)) / number if number else None


def macro_f1(sums: Mapping[str, float], num_classes: int) -> float | None:
    """Return the mean F1 of the classes that occur or are predicted, like scikit-learn's macro average."""
    each = [tuple(sums[f"{kind}_{index}"] for kind in _KINDS) for index in range(num_classes)]
    scores = [2 * hit / (said + true) for hit, said, true in each if said + true]
    return sum(scores) / len(scores) if scores else None


#: For predictions x and values y.
PAIR_SUMS = ("x", "y", "xx", "yy", "xy")


def pair_sums(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Add up the sums that a correlation of two vectors of the same length needs."""
    x, y = x.double(), y.double()
    return dict(zip(PAIR_SUMS, (x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()), strict=True))


def correlation(sums: Mapping[str, float], count: float) -> float | None:
    """Return Pearson's correlation, or None if one side is constant."""
    if not count:
        return None
    x, y, xx, yy, xy = (sums[name] / count for name in PAIR_SUMS)
    spread = (xx - x * x) * (yy - y * y)
    return (xy - x * y) / math.sqrt(spread) if spread > 0 else None


def perplexity(sums: Mapping[str, float]) -> float | None:
    """Return the exponential of the mean loss, or None if nothing was counted or the value overflows."""
    if not sums["count"]:
        return None
    mean = sums["loss"] / sums["count"]
    return math.exp(mean) if mean < 700 else None


def ordered_labels(names: Sequence[str]) -> list[str]:
    """Return the labels in order: integers by value, all others alphabetically."""
    numbers = all(name.lstrip("-").isdecimal() for name in names)
    return sorted(set(names), key=lambda name: (int(name), name) if numbers else (0, name))
