"""Plans as numpy columns, and the search space of plans."""
