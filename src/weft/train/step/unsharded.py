"""Whether all ranks were given the same samples, because nobody cut the loader: asked once, within the step's sums."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from weft.data.batch import tensors_in
from weft.errors import WeftWarning

#: Fingerprints are below this: the squares of 2**17 ranks' add up in float64 without rounding.
_BOUND = 2**18
#: Values of each tensor that are looked at.
_LOOKED_AT = 4096


def fingerprint(batch: Any) -> torch.Tensor:
    """(1, f, f squared) of a whole number f that the batch's values make; float64.

    Three zeros for a batch without tensors. Sums of it over the ranks are for `warn_if_alike`. Nothing waits for the
    device.
    """
    found: Any = None
    for tensor in tensors_in(batch):
        if tensor.layout is not torch.strided or tensor.is_meta:
            continue
        values = tensor.detach().reshape(-1)[:_LOOKED_AT].contiguous().view(torch.uint8).long()
        places = torch.arange(1, len(values) + 1, device=values.device)
        found = ((0 if found is None else found) * 31 + (values * places).sum()) % _BOUND
    if found is None:
        return torch.zeros(3, dtype=torch.float64)
    number = found.double()
    return torch.stack([torch.ones_like(number), number, number.square()])


def warn_if_alike(sums: Sequence[float], num_ranks: int, num_readers: int) -> None:
    """Warn where all ranks' fingerprints are one number. sums: of `fingerprint`. num_readers: data-parallel ranks."""
    num_known, total, squares = map(int, sums)
    # Equal only where no number differs from the mean; whole numbers, so nothing is rounded.
    if num_known < num_ranks or num_ranks * squares != total**2:
        return
    warnings.warn(
        f"batch: all {num_readers} data-parallel ranks were given the same samples at the first step, so together "
        "they do only the work of one. Cut the loader for the ranks: loader = run.shard(loader).",
        WeftWarning,
        stacklevel=5,
    )
