"""Committed and digested checkpoints that can be loaded under any plan."""
