"""The PyTorch and JAX implementations of the engine interface."""
