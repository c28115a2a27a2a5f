"""Reference results of the collectives, computed in one process from all ranks' inputs."""

from __future__ import annotations

import torch

FUNCTIONS = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the input of `rank`. Every rank can compute every other rank's input."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 100 if dtype == torch.uint8 else 30, (numel,), generator=generator).to(dtype)
    # Magnitudes differ widely, so another order of addition gives other bits.
    values = torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** (rank % 3)
    return torch.complex(values, values.flip(0)).to(dtype) if dtype.is_complex else values.to(dtype)


def combined(size: int, numel: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    """Combine all ranks' inputs in a tree over ranks. bf16 and fp16 are added in fp32 and rounded once."""
    wide = torch.float32 if op == "sum" and dtype in (torch.bfloat16, torch.float16) else dtype
    level = [data(rank, numel, dtype).to(wide) for rank in range(size)]
    # Combine neighbors in pairs, level by level. The last one of an odd level moves up unchanged.
    while len(level) > 1:
        pairs = [level[index : index + 2] for index in range(0, len(level), 2)]
        level = [FUNCTIONS[op](*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0].to(dtype)
