"""Kinds of devices: one table of what each kind offers, and one accessor for streams, memory and random numbers."""
