"""Ways to send: shared memory, gloo, the backend's own, staged through the host."""
