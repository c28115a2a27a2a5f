"""`weft launch`: the text of a job for several machines, from one config. Nothing is started."""

__all__: list[str] = []
