"""Differential privacy: clipped gradients of single samples, noise by position, and the account of a run's budget."""
