"""Embedding tables sharded over the data ranks, with gradients and optimizer steps by row (docs/adr/0044)."""
