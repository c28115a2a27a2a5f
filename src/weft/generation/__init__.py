"""Generation of text with a model in memory: requests in batches, sampling, and caches."""
