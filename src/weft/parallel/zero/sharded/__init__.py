"""ZeRO 3 on torch's fully_shard."""
