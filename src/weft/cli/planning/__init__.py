"""`weft plan`."""

__all__: list[str] = []
