"""Cost model: seconds and bytes of a step."""
