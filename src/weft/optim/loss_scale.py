"""Dynamic loss scaling for fp16: the scale grows while gradients are finite and is halved when they are not."""

from __future__ import annotations

from dataclasses import dataclass

#: Above this, fp32 sums of scaled gradients may overflow even if the gradients are normal.
MAX_SCALE = 2.0**32
MIN_SCALE = 1.0


@dataclass(slots=True)
class LossScale:
    """Scale of the loss before backward (Micikevicius et al. 2018, arXiv 1710.03740).

    The caller decides jointly for all ranks if a step was finite, so the scale is equal on all ranks. All scales are
    powers of two, so scaling and unscaling are exact.
    """

    scale: float = 2.0**16
    growth_interval: int = 1000
    enabled: bool = True
    good_steps: int = 0
    num_skipped: int = 0

    def factor(self) -> float:
        """Return the factor of the loss: 1.0 if scaling is off."""
        return self.scale if self.enabled else 1.0

    def update(self, finite: bool) -> None:
        """Account for one step: halve after a non-finite step, double after `growth_interval` finite ones."""
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
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "good_steps": self.good_steps, "num_skipped": self.num_skipped}

    def restore(self, state: dict[str, float | int]) -> None:
        """Restore the result of `state`."""
        self.scale = float(state["scale"])
        self.good_steps = int(state["good_steps"])
        self.num_skipped = int(state["num_skipped"])
