"""The first rank's observer: writes events.jsonl, draws loss.png, and shows progress on the terminal."""

from __future__ import annotations

from pathlib import Path

from weft.monitor import Display, EventLog, StepRecord, plot_loss, read_events
from weft.train.evaluate import Evaluation
from weft.train.folder import RunFolder
from weft.train.hooks import Hook


class Recorder(Hook):
    """Writes what happens to the run folder and passes it to the display."""

    def __init__(self, folder: RunFolder, display: Display, start: dict[str, object]):
        self._folder = folder
        self._display = display
        self._goes_on = folder.events.exists()
        self._log = EventLog(folder.events)
        self._start = start

    def on_start(self, start_step: int) -> None:
        if self._goes_on:
            # Readers then forget what was logged beyond this step: it is done again.
            self._log.write({"event": "resume", "step": start_step})
        self._log.write({"event": "start", "step": start_step, **self._start})

    def on_phase(self, name: str) -> None:
        self._display.phase(name)

    def on_step(self, record: StepRecord) -> str | None:
        self._log.write(record.to_event())
        self._display.step(record)

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        self._log.write(
            {
                "event": "eval",
                "step": step,
                "loss": evaluation.loss,
                "bits_per_byte": evaluation.bits_per_byte,
                "tokens": evaluation.num_tokens,
            }
        )
        self._display.evaluation(step, evaluation.loss, evaluation.bits_per_byte)

    def on_checkpoint(self, step: int, path: Path) -> None:
        self._log.write({"event": "checkpoint", "step": step, "path": path.name})

    def on_end(self, step: int, reason: str) -> None:
        self._log.write({"event": "end", "step": step, "reason": reason})
        plot_loss(read_events(self._folder.events), self._folder.loss_plot, title=str(self._folder.path.name))

    def close(self) -> None:
        """Let go of the terminal and the event log."""
        self._display.close()
        self._log.close()
