"""ZeRO 0 to 2 over flat buckets."""
