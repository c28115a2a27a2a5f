"""`weft doctor`: what this machine has, whether training will find what it needs, and what to do where not."""

__all__: list[str] = []
