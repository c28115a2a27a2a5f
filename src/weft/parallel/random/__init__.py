"""Random numbers that depend on samples and positions, not on ranks."""
