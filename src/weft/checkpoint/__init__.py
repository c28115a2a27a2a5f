"""Committed, digested checkpoints that any plan can read."""
