"""Statistics of batch norms over groups of samples."""
