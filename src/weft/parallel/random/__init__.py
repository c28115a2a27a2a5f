"""Random numbers that follow samples and positions."""
