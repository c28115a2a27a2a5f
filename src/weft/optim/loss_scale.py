"""Dynamic loss scaling for fp16: a scale that grows while gradients are finite and backs off when they are not."""

from __future__ import annotations

from dataclasses import dataclass

#: Beyond this, fp32 sums of scaled gradients may overflow by themselves.
MAX_SCALE = 2.0**32
MIN_SCALE = 1.0


@dataclass(slots=True)
class LossScale:
    """Scale of the loss before backward (Micikevicius et al. 2018, arXiv 1710.03740).

    The caller decides once for all ranks whether a step was finite, so every rank's scale stays equal.
    All scales are powers of two: scaling and unscaling lose no bit.
    """

    scale: float = 2.0**16
    growth_interval: int = 1000
    enabled: bool = True
    good_steps: int = 0
    num_skipped: int = 0

    def factor(self) -> float:
        """Return what the loss is multiplied by: 1.0 when scaling is off."""
        return self.scale if self.enabled else 1.0

    def update(self, finite: bool) -> None:
        """Account for one step: halve after a step that was not finite, double after `growth_interval` good ones."""
        if not self.enabled:
            return
        if not finite:
            self.scale = max(MIN_SCALE, self.scale / 2)
            self.good_steps = 0
            self.num_skipped += 1
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale = min(MAX_SCALE, self.scale * 2)
            self.good_steps = 0

    def state(self) -> dict[str, float | int]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}

    def restore(self, state: dict[str, float | int]) -> None:
        """Take back what `state` gave."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.num_skipped = int(state["num_skipped"])
