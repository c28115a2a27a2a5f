"""Random numbers that follow samples and positions, whichever rank draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "CutPart",
    "SampleNumbers",
    "bernoulli",
    "cut_part_of",
    "drawing_by",
    "drops_itself",
    "keep_part",
    "keeps",
    "kept_at",
    "key_of",
    "lines_of",
    "rand_like",
    "randint_like",
    "randn_like",
    "rows_of_samples",
]

if TYPE_CHECKING:
    from weft.parallel.randomness.cut_part import CutPart, cut_part_of, keep_part
    from weft.parallel.randomness.draws import bernoulli, drawing_by, rand_like, randint_like, randn_like
    from weft.parallel.randomness.dropping_modules import drops_itself
    from weft.parallel.randomness.position_noise import keeps, kept_at, key_of, lines_of
    from weft.parallel.randomness.samples import SampleNumbers, rows_of_samples

__getattr__ = loads(
    __name__,
    {
        "CutPart": ".cut_part",
        "SampleNumbers": ".samples",
        "bernoulli": ".draws",
        "cut_part_of": ".cut_part",
        "drawing_by": ".draws",
        "drops_itself": ".dropping_modules",
        "keep_part": ".cut_part",
        "keeps": ".position_noise",
        "kept_at": ".position_noise",
        "key_of": ".position_noise",
        "lines_of": ".position_noise",
        "rand_like": ".draws",
        "randint_like": ".draws",
        "randn_like": ".draws",
        "rows_of_samples": ".samples",
    },
)
