"""Measuring this machine for the planner."""
