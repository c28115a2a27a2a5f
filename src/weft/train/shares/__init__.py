"""Unequal shares of the data-parallel ranks: measured before the first step, changed between steps, recorded."""
