"""zero=3: parameters sharded by PyTorch's fully_shard."""

from weft.parallel.zero.sharded.sharded_model import FullyShardedModel

__all__ = ["FullyShardedModel"]
