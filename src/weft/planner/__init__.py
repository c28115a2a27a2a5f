"""Step time and memory of plans, and the search for the best one; no torch."""
