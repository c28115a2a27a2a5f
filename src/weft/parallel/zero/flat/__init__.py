"""ZeRO 0, 1 and 2 over flat buckets."""
