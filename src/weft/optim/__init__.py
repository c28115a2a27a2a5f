"""Optimizers, schedules, clipping and loss scale."""
