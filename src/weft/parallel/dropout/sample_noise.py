"""Noise that a module draws for samples: by the sample's number, as dropout is, whichever rank has the sample.

A tensor is noise for samples if its first dim has one row for each sample of the microbatch. Other noise, such as that
of weights, comes from torch's generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.parallel.dropout.drops import DropSite
from weft.parallel.randomness import lines_of


def noise_of(func: Any, site: DropSite, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the noise of a call of torch, or None if it is not noise for samples.

    Args:
        func: of torch, or a method of Tensor.
        site: of the module that calls it.
        args: of the call.
        kwargs: of the call.
    """
    draw = _DRAWS.get(func)
    if draw is None or kwargs.get("generator") is not None or kwargs.get("out") is not None:
        return None
    return draw(site, *args, **kwargs)


def draws(func: Any) -> bool:
    """Return whether `noise_of` replaces a function of torch."""
    return func in _DRAWS


def _uniform(site: DropSite, shape: Sequence[int], device: torch.device | str | None) -> Tensor | None:
    """Numbers between 0 and 1 by position, float64, or None if the rows are no samples."""
    where = torch.empty(0, device=device).device
    key = site.key_of_noise(shape)
    if key is None:
        return None
    places = [site.rows(shape[0], where), *(torch.arange(size, device=where) for size in shape[1:])]
    return (lines_of(key, places).double() + (2.0**31 + 0.5)) * 2.0**-32


def _like(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor | None]:
    def draw(site: DropSite, input: Tensor, *, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor | None:
        found = _uniform(site, input.shape, device or input.device)
        return None if found is None else _leaf(change(found).to(dtype or input.dtype), rest)

    return draw


def _sized(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor | None]:
    def draw(site: DropSite, *size: Any, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor | None:
        size = rest.pop("size", size)
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        found = _uniform(site, shape, device or torch.get_default_device())
        return None if found is None else _leaf(change(found).to(dtype or torch.get_default_dtype()), rest)

    return draw


def _leaf(noise: Tensor, options: dict[str, Any]) -> Tensor:
    return noise.requires_grad_() if options.get("requires_grad") else noise


def _in_place(change: Callable[..., Tensor]) -> Callable[..., Tensor | None]:
    def draw(site: DropSite, self: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        kwargs.pop("generator", None)
        found = _uniform(site, self.shape, self.device)
        return None if found is None else self.copy_(change(found, *args, **kwargs))

    return draw


def _bernoulli(site: DropSite, input: Tensor, p: float | None = None, **rest: Any) -> Tensor | None:
    del rest
    found = _uniform(site, input.shape, input.device)
    return None if found is None else (found < (input if p is None else p)).to(input.dtype)


def _integers(
    site: DropSite, low: int, high: Any = None, size: Any = None, *, dtype: Any = None, device: Any = None, **rest: Any
) -> Tensor | None:
    del rest
    if not isinstance(high, int):
        low, high, size = 0, low, high if size is None else size
    found = _uniform(site, size, device or torch.get_default_device())
    return None if found is None else (found * (high - low) + low).floor().to(dtype or torch.int64)


def _normal(uniform: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return torch.special.ndtri(uniform) * std + mean


def _between(uniform: Tensor, low: float = 0.0, high: float = 1.0, **named: float) -> Tensor:
    low, high = named.get("from", low), named.get("to", high)
    return uniform * (high - low) + low


def _same(uniform: Tensor) -> Tensor:
    return uniform


_DRAWS: dict[Any, Callable[..., Tensor | None]] = {
    torch.randn_like: _like(_normal),
    torch.rand_like: _like(_same),
    torch.randn: _sized(_normal),
    torch.rand: _sized(_same),
    torch.randint: _integers,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.normal_: _in_place(_normal),
    Tensor.uniform_: _in_place(_between),
    Tensor.exponential_: _in_place(lambda uniform, lambd=1.0: uniform.log() / -lambd),
    Tensor.bernoulli_: _in_place(lambda uniform, p=0.5: (uniform < p).to(uniform.dtype)),
}
