"""`weft config`: show, check, explain and import configs."""

__all__: list[str] = []
