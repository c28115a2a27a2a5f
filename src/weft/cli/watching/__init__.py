"""Verbs about a run that trains: asking it for something, going on after a hold, trying alerts."""

__all__: list[str] = []
