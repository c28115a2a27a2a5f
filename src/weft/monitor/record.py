"""StepRecord: all that is known of one optimizer step, as the event log, the display and the plot read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: What an event of a step leaves out.
_NOT_TOLD = frozenset({"unit", "busy_s", "exposed", "data_s", "own", "usual_loss"})
#: What an evaluation found beside the loss: (value, its unit or name).
Metrics = Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step.

    step: steps done, this one included (1 is the first). loss: mean over what is counted. count: how many were trained
    in this step, over all ranks; unit: what they are, such as "tokens". seconds: host time by phase, and "total".
    memory_bytes: this rank's peak. busy_s: this rank computed and waited for nobody; exposed: it waited for others, by
    axis; data_s: it waited for data; own: its own work by part; these four stay out of the event, where figures of all
    ranks have their own. usual_loss: where the loss jumps far above it.
    samples_per_s: where they are not what is counted. skipped: why the weights were not changed, or None. mfu: None
    where the device's peak is not known. loss_scale: of fp16, else None. update_ratio: norm of the update over the norm
    of the weights, None in a step that does not measure it.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    count: int
    count_per_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    mfu: float | None = None
    loss_scale: float | None = None
    update_ratio: float | None = None
    skipped: str | None = None
    unit: str = "tokens"
    samples_per_s: float | None = None
    busy_s: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    data_s: float = 0.0
    own: Mapping[str, float] = field(default_factory=dict)
    usual_loss: float | None = None

    def to_event(self) -> dict[str, object]:
        """Return one line of events.jsonl, of kind "step"; what does not apply to this run is left out.

        Counts are called by their unit: "tokens" and "tokens_per_s".
        """
        names = {"count": self.unit, "count_per_s": f"{self.unit}_per_s"}
        event: dict[str, object] = {"event": "step"}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and name not in _NOT_TOLD:
                event[names.get(name, name)] = value
        event["seconds"] = {phase: round(seconds, 6) for phase, seconds in self.seconds.items()}
        return event
