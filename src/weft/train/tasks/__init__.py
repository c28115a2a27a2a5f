"""Kinds of training: model, data and loss."""
