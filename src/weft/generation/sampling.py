"""Sampling of tokens with random numbers that depend on seed, request and position alone. V vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.generation.requests import Sampling

_MASK = 2**64 - 1


def uniform(seed: int, key: int, position: int) -> float:
    """Return a random number in [0, 1) with 53 bits, a function of the arguments.

    Mixes the arguments one after another with the finalizer of SplitMix64 (Steele et al., 2014).
    """
    state = 0
    for value in (seed, key, position):
        state = (state + (value & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) / 2**53


def choose(
    logits_BV: Tensor, sampling: Sampling, keys: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return one id per row and its log probability, (B,) each.

    Sampling inverts the cumulative distribution, so rounding of the logits changes a token only if the random number
    is at the border between two tokens.

    Args:
        logits_BV: any dtype; computed in fp32 or wider.
        sampling: temperature, top_k, top_p and seed.
        keys: keys of the rows' requests.
        positions: positions of the new tokens in their texts.
    """
    x_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    if sampling.temperature == 0:
        ids_B = x_BV.max(-1).indices  # the first of equal ones; faster than argmax on a CPU
    else:
        x_BV = x_BV / sampling.temperature
        numbers = [uniform(sampling.seed, key, position) for key, position in zip(keys, positions, strict=True)]
        ids_B = _sampled(x_BV, sampling, torch.tensor(numbers, dtype=torch.float64, device=x_BV.device))
    return ids_B, x_BV.gather(-1, ids_B[:, None])[:, 0] - x_BV.logsumexp(-1)


def _sampled(x_BV: Tensor, sampling: Sampling, numbers_B: Tensor) -> Tensor:
    ids_BN = None
    if (sampling.top_k is not None and sampling.top_k < x_BV.shape[1]) or sampling.top_p < 1:
        x_BV, ids_BN = x_BV.topk(min(sampling.top_k or x_BV.shape[1], x_BV.shape[1]))
    probs_BN = x_BV.softmax(-1)
    # Sums in float64, because in fp32 the sum of many small probabilities differs from 1 by more than some tokens have.
    if sampling.top_p < 1:
        before_BN = probs_BN.cumsum(-1, dtype=torch.float64) - probs_BN
        probs_BN = probs_BN.masked_fill(before_BN >= sampling.top_p, 0.0)
    ends_BN = probs_BN.cumsum(-1, dtype=torch.float64)
    total_B = ends_BN[:, -1]
    # The first token whose interval ends after the number. Tokens of probability 0 have no interval.
    point_B = torch.minimum(numbers_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    found_B1 = torch.searchsorted(ends_BN, point_B[:, None], right=True)
    return (found_B1 if ids_BN is None else ids_BN.gather(-1, found_B1))[:, 0]
