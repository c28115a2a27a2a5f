"""ZeRO: weights, gradients and optimizer states divided among the ranks that read samples.

`flat` is zero=0, 1 and 2 over flat buckets, `sharded` is zero=3 on fully_shard. What both need lies beside them.
"""

from weft.parallel.zero.engine import build_engine

__all__ = ["build_engine"]
