"""Inspection of any model: blocks, layers, layouts, cost. It does not change the model."""
