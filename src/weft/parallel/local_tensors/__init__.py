"""A model's tensors: as one process holds them, in which formats, and which stretch of each a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "Original",
    "OriginalParameters",
    "PlacedPart",
    "Precision",
    "SavedTensor",
    "StateSource",
    "Stretch",
    "alone",
    "cast_inputs",
    "filled",
    "flat_of",
    "formats",
    "grown",
    "originals_of",
    "refuse_float64",
    "read_whole",
    "tell_places",
]

if TYPE_CHECKING:
    from weft.parallel.local_tensors.original import Original, grown, originals_of, refuse_float64
    from weft.parallel.local_tensors.precision import Precision, cast_inputs, formats
    from weft.parallel.local_tensors.stale_references import OriginalParameters
    from weft.parallel.local_tensors.stretches import (
        PlacedPart,
        SavedTensor,
        StateSource,
        Stretch,
        alone,
        filled,
        flat_of,
        read_whole,
        tell_places,
    )

__getattr__ = loads(
    __name__,
    {
        "Original": ".original",
        "OriginalParameters": ".stale_references",
        "PlacedPart": ".stretches",
        "Precision": ".precision",
        "SavedTensor": ".stretches",
        "StateSource": ".stretches",
        "Stretch": ".stretches",
        "alone": ".stretches",
        "cast_inputs": ".precision",
        "filled": ".stretches",
        "flat_of": ".stretches",
        "formats": ".precision",
        "grown": ".original",
        "originals_of": ".original",
        "refuse_float64": ".original",
        "read_whole": ".stretches",
        "tell_places": ".stretches",
    },
)
