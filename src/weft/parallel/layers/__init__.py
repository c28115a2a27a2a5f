"""Layers that techniques put into models."""
