"""Transports: shared memory, gloo, the backend's collectives, staging through the host."""
