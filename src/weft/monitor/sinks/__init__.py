"""Sinks: destinations of metrics in addition to events.jsonl."""
