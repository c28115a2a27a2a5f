"""What XLA compiled: the collectives of a step, and the bytes of its arguments on each device."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from weft.jax_engine.program import Program

_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_CALL = re.compile(rf"= (.+?) ({'|'.join(_COLLECTIVES)})(?:-start)?\(")
_SHAPE = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")


def collectives(program: str) -> Counter[str]:
    """Count the collectives of a compiled program's text by kind. Reductions of single numbers are not counted."""
    found: Counter[str] = Counter()
    for shapes, kind in _CALL.findall(program):
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for _, dims in _SHAPE.findall(shapes)]
        if max(sizes, default=0) > 4:
            found[kind] += 1
    return found


def lowered(
    program: Program, params: Mapping[str, Any], buffers: Mapping[str, Any], states: Any, inputs: Sequence[Any]
):
    """Return the step compiled for these arrays."""
    import numpy as np

    return program.step.lower(params, buffers, states, inputs, np.int64(0), np.float64(1.0)).compile()


def bytes_per_device(arrays: Any) -> int:
    """Return the bytes that a tree of arrays takes on the device with the most."""
    total: Counter[Any] = Counter()
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            total[shard.device] += shard.data.nbytes
    return max(total.values(), default=0)
