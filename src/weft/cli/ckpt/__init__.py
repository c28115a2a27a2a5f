"""`weft ckpt` and `weft resume-diff`: checkpoints of a run, without torch where no torch is needed."""

__all__: list[str] = []
