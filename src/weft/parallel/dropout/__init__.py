"""Dropout and other random numbers of forward, by position."""
