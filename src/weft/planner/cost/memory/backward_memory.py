"""The fullest moment of a backward whose gradients stay where they are made: one process, one pass a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def fullest_of_backward(
    layers: Array, saved: Array, gradients: Array, ends: Array, *, tied: bool
) -> tuple[Array, Array]:
    """Return the shares of activations and of gradients that are there when both together are most.

    Activations go as gradients come. Most is there while the last layer is at work, with the head's gradient alone, or
    at the first layer, with all gradients but its own and the embedding's.

    Args:
        layers: of the rank.
        saved: bytes that all of them keep for backward.
        gradients: bytes of all gradients.
        ends: bytes of those of embedding and head.
        tied: whether these are one parameter.
    """
    count = np.maximum(1.0, layers)
    head = ends if tied else ends / 2
    late = head + (gradients - ends) * (count - 1) / count
    is_late = saved / count + late > saved + head
    made = np.where(is_late, late, head) / np.maximum(1.0, gradients)
    return np.where(is_late, 1 / count, 1.0), made
