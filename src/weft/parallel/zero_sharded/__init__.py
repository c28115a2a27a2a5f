"""ZeRO 3 on PyTorch's fully_shard."""
