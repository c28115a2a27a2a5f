"""zero=0, 1 and 2: parameters side by side in flat buckets."""

from weft.parallel.zero.flat.flat_model import FlatModel
from weft.parallel.zero.flat.recorded import PassEnd, RecordedPasses
from weft.parallel.zero.flat.slot_stretches import SeenWeights

__all__ = ["FlatModel", "PassEnd", "RecordedPasses", "SeenWeights"]
