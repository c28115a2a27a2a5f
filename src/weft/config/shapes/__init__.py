"""Shapes of models: built-in sizes, configs of transformers, traced modules."""
