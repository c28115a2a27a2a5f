"""`weft drill`: faults, one by one, on the user's own config and machine."""

__all__: list[str] = []
