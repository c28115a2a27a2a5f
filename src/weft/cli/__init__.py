"""The `weft` command: one thin file per verb. Nothing here is imported before its verb is typed."""

__all__: list[str] = []
