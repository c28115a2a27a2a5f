"""A GPU simulated on the host."""
