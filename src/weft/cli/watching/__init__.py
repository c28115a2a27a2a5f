"""Verbs about a run: asking it for something, going on after a hold, trying alerts, a step that went wrong."""

__all__: list[str] = []
