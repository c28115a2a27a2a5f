"""Compressed formats of gradients and weights between ranks."""
