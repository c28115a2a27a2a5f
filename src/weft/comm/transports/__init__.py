"""Transports: shared memory, gloo, two levels, the backend's collectives, and copies through the host."""
