"""The plans that may be tried, as columns of numbers."""
