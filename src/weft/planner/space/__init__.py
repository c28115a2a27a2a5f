"""Plans as columns of numbers, and which ones are tried."""
