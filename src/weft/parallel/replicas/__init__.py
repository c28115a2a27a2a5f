"""Replicas that synchronize after several steps."""
