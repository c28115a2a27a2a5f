"""A second engine: models captured by torch.export run as one JAX program. Only this package imports jax."""
