"""Command line verbs."""
