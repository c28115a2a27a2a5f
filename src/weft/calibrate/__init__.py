"""Measurement of this machine for the planner."""
