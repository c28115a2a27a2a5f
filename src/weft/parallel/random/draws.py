"""Random tensors for a model's forward and its loss, equal under every plan: `weft.randn_like` and similar functions.

In a step of Weft, an element's value depends on the seed, the step, the calling module, the number of random tensors
that the module has drawn in this forward, the sample's index in the global batch, and the element's position in the
sample. It does not depend on ranks, accumulation and resuming. Outside a step (evaluation, a custom loop, without Weft)
these functions are torch's, with torch's generator.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from weft.parallel.random.streams import integers_at
from weft.private_torch import uncompiled

#: Number of random bits per dtype for a value in [0, 1), as in torch.rand.
_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


class Positions(Protocol):
    """Gives random tensors their key and the positions of their elements in the global batch."""

    def next_draw(self, like: Tensor, modules: Iterable[nn.Module]) -> tuple[Tensor, list[Tensor]]:
        """Return the key of the next random tensor, and the positions of its elements along each dim.

        like: tensor of the shape to draw. modules: modules on the call stack, the innermost first.
        """
        ...


_active: list[Positions] = []  # the innermost context is the last


@contextmanager
def drawing_by(positions: Positions) -> Iterator[None]:
    """Draw random tensors in the context as functions of these positions."""
    _active.append(positions)
    try:
        yield
    finally:
        _active.pop()


@uncompiled
def randn_like(input: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Draw normally distributed values in the shape of `input`, equal under every plan within a step of Weft.

    Args:
        input: (samples, ...).
        dtype: dtype of the result; None takes the input's.

    Raises:
        ModelError: within a step, if dim 0 is not the batch dim, or the plan shards a tensor of unknown layout.
    """
    dtype = dtype or input.dtype
    if not _active or not dtype.is_floating_point:
        return torch.randn_like(input, dtype=dtype)
    numbers = _draw(input, 52).double()
    return torch.special.ndtri((numbers + 0.5) / 2**52).to(dtype)


@uncompiled
def rand_like(input: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """Draw numbers from [0, 1) of the shape of `input`, equal under every plan within a step of Weft.

    Args:
        input: (samples, ...).
        dtype: dtype of the result; None takes the input's.

    Raises:
        ModelError: as for `randn_like`.
    """
    dtype = dtype or input.dtype
    if not _active or dtype not in _BITS:
        return torch.rand_like(input, dtype=dtype)
    return (_draw(input, _BITS[dtype]).double() / 2 ** _BITS[dtype]).to(dtype)


@uncompiled
def randint_like(input: Tensor, low: int, high: int | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Draw integers from low to high - 1 in the shape of `input`, equal under every plan within a step of Weft.

    With one bound, values are from 0 to low - 1, as for torch.randint_like.

    Args:
        input: (samples, ...).
        low: smallest value.
        high: largest value plus 1.
        dtype: dtype of the result; None takes the input's.

    Raises:
        ModelError: as for `randn_like`.
    """
    first, end = (0, low) if high is None else (low, high)
    if not _active or end <= first:
        return torch.randint_like(input, first, end, dtype=dtype)
    return (_draw(input, 62) % (end - first) + first).to(dtype or input.dtype)


@uncompiled
def bernoulli(input: Tensor, p: float | None = None) -> Tensor:
    """Draw 1 with the probabilities in `input`, else 0, equal under every plan within a step of Weft.

    Args:
        input: probabilities, (samples, ...). If p is given, only the shape is used.
        p: single probability for all elements.

    Raises:
        ModelError: as for `randn_like`.
    """
    if not _active:
        return torch.bernoulli(input) if p is None else torch.bernoulli(input, p)
    numbers = _draw(input, 53).double() / 2**53
    return (numbers < (input.detach().double() if p is None else p)).to(input.dtype)


def _draw(like: Tensor, bits: int) -> Tensor:
    key, places = _active[-1].next_draw(like, _calling_modules())
    return integers_at(key, places, bits)


def _calling_modules() -> Iterator[nn.Module]:
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and isinstance(module := frame.f_locals.get(code.co_varnames[0]), nn.Module):
            yield module
        frame = frame.f_back
