"""AdamW's running means as floats of one byte that need no scale.

Block-wise 8-bit optimizers (Dettmers et al. 2022, arXiv 2110.02861; bitsandbytes and torchao) keep a scale for each
block of elements. Plans cut parameters through such blocks, so their numbers would differ from plan to plan. Here each
element stands alone: an exponent wide enough for every mean and one bit of mantissa, rounded at random, which keeps
the mean of many steps right. `exp_avg` has a sign and reaches from 2^-48 to 2^15 (int8); `exp_avg_sq` from 2^-96 to
2^31 (uint8), whose root reaches as far down. What is smaller becomes zero, what is larger the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Bits of fp32 that are cut off: all of the mantissa but one.
_CUT = 22
#: What code 0 would be if it were no zero: exponent and mantissa bit of fp32, one below the smallest number.
_ZERO = {torch.int8: (127 - 48) * 2 - 1, torch.uint8: (127 - 96) * 2 - 1}
_MAGNITUDE = 2**31 - 1
#: As noise, it rounds to the nearest.
HALF = 1 << 15


def encode_bytes(x: Tensor, noise: Tensor | int, dtype: torch.dtype) -> Tensor:
    """Return x as codes of its shape, rounded away from zero with the probability of what is cut off.

    Args:
        x: of any float format; not negative for uint8.
        noise: 16 random bits for each element, int32, or `HALF` for all.
        dtype: int8 with a sign, uint8 without.
    """
    bits = x.float().view(torch.int32) & _MAGNITUDE
    code = ((bits + (noise << (_CUT - 16))) >> _CUT) - _ZERO[dtype]
    code = code.clamp_(0, torch.iinfo(dtype).max)
    return (torch.where(x < 0, -code, code) if dtype == torch.int8 else code).to(dtype)


def decode_bytes(code: Tensor) -> Tensor:
    """Return the float32 numbers of int8 or uint8 codes; bf16 holds them exactly."""
    magnitude = code.to(torch.int32).abs_()
    found = torch.where(magnitude > 0, (magnitude + _ZERO[code.dtype]) << _CUT, 0).view(torch.float32)
    return torch.where(code < 0, -found, found) if code.dtype == torch.int8 else found


def exact_moment(state: Tensor) -> Tensor:
    """Return a running mean as floats: decoded where it holds codes, else as it is."""
    return decode_bytes(state) if state.dtype in _ZERO else state
