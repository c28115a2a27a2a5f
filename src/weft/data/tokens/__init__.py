"""Tokenizers, and text turned into tokens once."""
