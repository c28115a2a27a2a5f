"""Comparisons of training settings: paired runs, measures of their event logs, and sweeps."""
