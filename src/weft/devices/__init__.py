"""Kinds of devices: one table of their properties, and one accessor for streams, memory and random numbers."""
