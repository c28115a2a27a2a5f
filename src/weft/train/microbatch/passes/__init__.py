"""Forward and backward of one microbatch: what it runs inside of, and how it is recorded and launched as one."""

from __future__ import annotations

from weft.train.microbatch.passes.graphed_passes import GraphedPasses, MicrobatchInputs, compute_of, graphed_passes
from weft.train.microbatch.passes.insides import insides_of

__all__ = ["GraphedPasses", "MicrobatchInputs", "compute_of", "graphed_passes", "insides_of"]
