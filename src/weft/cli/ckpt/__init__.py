"""`weft ckpt` and `weft resume-diff`: what lies in folders of checkpoints, without torch where no torch is needed."""

__all__: list[str] = []
