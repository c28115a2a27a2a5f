"""Tokenized data on disk."""
