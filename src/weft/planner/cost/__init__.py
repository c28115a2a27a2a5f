"""Cost model: time and memory of a step."""
