"""Ranks of one machine: started, watched, and heard when they fail."""
