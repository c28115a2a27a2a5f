"""Checkpoints that are committed atomically, have digests, and can be loaded under any plan."""
