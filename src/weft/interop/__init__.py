"""Configs and checkpoints of other trainers."""
