"""Memory of private steps: microbatches of the largest Poisson draw, and factors of per-sample gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.planner.space.columns import PRECISIONS, Columns, Job


def in_largest_draw(job: Job, columns: Columns) -> Columns:
    """Return the columns with the microbatches of the largest draw."""
    assert job.private is not None
    return columns.with_arrays(microbatch=-(-job.private.most // (columns.dp * columns.num_micro)) * job.texts)


def factor_bytes(job: Job, columns: Columns) -> NDArray[np.float64]:
    """Return the bytes that one pass keeps until the norms of a microbatch are known, beyond its saved inputs.

    For each sample and linear layer, they are the output gradient, or the weight's gradient if it is smaller than the
    factors. zero=3 and pipelines take two passes, which keep none.
    """
    assert job.private is not None
    tokens, vocab = float(job.seq_len), float(job.shape.vocab)
    each = vocab * tokens
    if job.adapter is not None:
        thin = job.adapter
        each = job.shape.layers * min(tokens * (thin.width / 2 + thin.products * thin.rank), thin.width * thin.rank)
    else:
        each += job.shape.layers * math.fsum(
            count * _of_product(inputs, outputs, tokens) for inputs, outputs, count in job.linears
        )
    width: Any = np.where(columns.precision == PRECISIONS.index("fp64"), 8.0, np.where(columns.in_fp32, 4.0, 2.0))
    is_one_pass = (columns.zero < 3) & (columns.pp == 1) & (job.private.passes != 2)
    return np.where(is_one_pass, columns.microbatch * each * width / columns.tp, 0.0)


def _of_product(inputs: float, outputs: float, tokens: float) -> float:
    is_small = inputs * outputs <= 2 * tokens * (inputs + outputs)
    return inputs * outputs if is_small else tokens * outputs
