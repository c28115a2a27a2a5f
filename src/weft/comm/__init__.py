"""The device mesh, collectives over its axes, and counts of their bytes and time."""
