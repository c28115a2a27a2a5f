"""Private runs: drawn batches, and the settings of a run's config."""
