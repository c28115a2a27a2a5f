"""Random numbers that follow positions: what is drawn for an element depends on its place in the whole, on no rank.

An element's number is a hash of a key and of its place in each dim. The places of all dims but the last are mixed one
after another in 64 bits (the finaliser of SplitMix64, Steele et al. 2014, doi 10.1145/2660193.2660195), which is little
work; what is left for each element are two rounds of multiply and shift in 32 bits, in the manner of the integer hashes
of Wellons ("lowbias32", 2018). No generator of torch is used or changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

#: Odd constants; those above 2^63 and 2^31 as the negative numbers that torch takes for them.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_FIRST_32, _SECOND_32 = 0x7FEB352D, 0x846CA68B - 2**32


def key_of(*parts: int | str) -> int:
    """Return a key from numbers and names, the same on every machine."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def lines_of(key: int | Tensor, places: Sequence[Tensor]) -> Tensor:
    """Return a number for each combination of places, int32 of shape (len(places[0]), len(places[1]), ...).

    key: a number, or the same as an int64 tensor without dims. places: int64 vectors on one device, at least one where
    the key is a number.
    """
    mixed = key if isinstance(key, Tensor) else torch.full((), key, dtype=torch.int64, device=places[0].device)
    for dim in places:
        mixed = _mix(mixed[..., None] + (dim + 1) * _STEP)
    return mixed.to(torch.int32)


def keeps(lines: Tensor, columns: Tensor, rate: float) -> Tensor:
    """Return which elements stay when each goes with probability `rate`; bool, of the two shapes together.

    Args:
        lines: of `lines_of` for all dims but the last, with a last dim of 1.
        columns: of `lines_of` for the last one.
        rate: 0 to 1.
    """
    return _hash(lines ^ columns) >= round(rate * 2**32) - 2**31


def integers_at(key: Tensor, places: Sequence[Tensor], bits: int) -> Tensor:
    """Draw an integer below 2^bits for each combination of positions, int64 of shape (len(places[0]), ...).

    Args:
        key: int64, 0-d.
        places: int64, 1-D, one for each dim.
        bits: 1 to 62.
    """
    high, low = (_words(mixed, places) for mixed in (key, key ^ _STEP))
    return ((high << 30) ^ (low >> 2)) >> (62 - bits)


def _words(key: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Draw 32 bits for each combination of positions, int64 of at least 0."""
    if not places:
        return _hash(lines_of(key, ())).long() + 2**31
    lines, columns = lines_of(key, places[:-1])[..., None], lines_of(~key, places[-1:])
    return _hash(lines ^ columns).long() + 2**31


def _hash(x: Tensor) -> Tensor:
    """Apply two rounds of multiply and shift to `x` (int32), and return it."""
    x.mul_(_FIRST_32)
    x.bitwise_xor_((x >> 15).bitwise_and_((1 << 17) - 1))
    x.mul_(_SECOND_32)
    return x


def kept_at(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    """Draw what `keeps` says of elements at all combinations of places: lines by the key, columns by its complement.

    Shape: (len(places[0]), len(places[1]), ...). One operator where it is compiled: generated code takes places for
    index arithmetic, which is not done in 64 bits, and would draw other numbers.

    Args:
        key: int64, 0-d.
        places: int64, 1-D, one for each dim.
        rate: 0 to 1.
    """
    if torch.compiler.is_compiling():
        return kept(key, places, rate)
    return keeps(lines_of(key, places[:-1])[..., None], lines_of(~key, places[-1:]), rate)


@torch.library.custom_op("weft::kept", mutates_args=(), schema="(Tensor key, Tensor[] places, float rate) -> Tensor")
def kept(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    """`kept_at` as an operator of torch."""
    return kept_at(key, places, rate)


@kept.register_fake
def _kept_shape(key: Tensor, places: Sequence[Tensor], rate: float) -> Tensor:
    del rate
    return torch.empty([len(one) for one in places], dtype=torch.bool, device=key.device)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
