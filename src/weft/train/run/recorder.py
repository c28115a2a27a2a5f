"""The first rank's observer: writes events.jsonl, has loss.png drawn, and shows progress on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from weft.monitor import EventLog, StepRecord, read_events
from weft.monitor.alerts import Wish, action_line
from weft.monitor.screen import Artist, Display, plot_loss
from weft.train.engine import Evaluation
from weft.train.folder import RunFolder
from weft.train.loop import Hook, SaveEnd
from weft.train.run.telling import seen_digests
from weft.train.task import Task


class RunRecorder(Hook):
    """Writes what happens to the run folder and passes it to the display."""

    def __init__(self, folder: RunFolder, task: Task, display: Display, start: dict[str, object]):
        self._folder, self._task = folder, task
        self._display = display
        self._goes_on = folder.events.exists()
        self._log = EventLog(folder.events)
        self._start = start
        self._artist = Artist(folder.events, folder.loss_plot, folder.path.name)
        self._saved: int | None = None
        self._is_full = False

    def on_start(self, start_step: int) -> None:
        if self._goes_on:
            # Readers then forget what was logged beyond this step: it is done again.
            self._log.write({"event": "resume", "step": start_step})
        self._log.write({"event": "start", "step": start_step, **self._start})
        self._saved = start_step or None

    def on_phase(self, name: str) -> None:
        self._display.phase(name)

    def on_step(self, record: StepRecord) -> str | None:
        self._log.write(record.to_event())
        self._tell_of_room()
        self._display.step(record)
        if (usual := record.usual_loss) is not None:
            back = f", or go back with resume.step={self._saved}" if self._saved else ""
            self.on_warning(
                record.step,
                f"step {record.step}: the loss jumped to {record.loss:.4g}; {usual:.4g} is typical of recent steps. "
                f"If it stays high, lower optimizer.lr or optimizer.max_grad_norm{back}.",
            )
        self._artist.draw_when_late()
        return None

    def _tell_of_room(self) -> None:
        """Say once that the disk is full, and once that it is not any more."""
        if (is_full := self._log.num_waiting > 0) != self._is_full:
            self._is_full = is_full
            name, at = self._folder.events.name, self._folder.path
            self._display.note(
                f"run.dir={at}: the disk is full. Training goes on, and {name} is written when there is room."
                if is_full
                else f"run.dir={at}: there is room again, and {name} is written."
            )

    def on_evaluation(self, step: int, evaluation: Evaluation) -> str | None:
        found = evaluation.metrics
        event = {"event": "eval", "step": step, "loss": evaluation.loss, **found, self._task.unit: evaluation.count}
        self._log.write(event)
        shown = [(found.get(metric.name), metric.label) for metric in self._task.metrics]
        self._display.evaluation(step, evaluation.loss, [(value, label) for value, label in shown if value is not None])
        self._artist.draw_soon()
        return None

    def on_warning(self, step: int, text: str) -> None:
        self._log.write({"event": "warning", "step": step, "text": text})
        self._display.note(text)

    def on_trace(self, event: Mapping[str, object]) -> None:
        self._log.write({**event, "seen": seen_digests(self._task, event)})
        self._display.note(f"step {event['step']}: {event['text']}.")
        self._display.note(f"weft explain {self._folder.path} --step {event['step']} shows the samples.")

    def on_action(self, step: int, wish: Wish) -> None:
        if wish.action != "tell":
            told = {"action": wish.action, "why": wish.why, "by": wish.by, "since": wish.since}
            self._log.write({"event": "action", "step": step, **{key: one for key, one in told.items() if one}})
        self._display.note(action_line(step, wish))

    def on_note(self, step: int, text: str) -> None:
        """Show a line, which an event of its own has said already."""
        self._display.note(text)

    def on_figures(self, event: Mapping[str, object]) -> None:
        """Write an event of figures; the thread that makes it calls this."""
        self._log.write(event)

    def on_slow(self, event: Mapping[str, object]) -> None:
        """Write an event of a rank that is slow, and show it; the thread of figures calls this."""
        self._log.write(event)
        self._display.note(f"step {event['step']}: {event['text']}.")

    def on_moved(self, before: int, step: int) -> None:
        if step < before:  # readers then forget what was logged beyond this step
            self._log.write({"event": "resume", "step": step})

    def on_checkpoint(self, saved: SaveEnd) -> None:
        assert saved.path is not None
        times = {"stall_s": round(saved.stall_s, 4), "durable_s": round(saved.durable_s, 4)}
        if saved.is_copy:
            self._log.write({"event": "copy", "step": saved.step, **times})
            return
        self._log.write({"event": "checkpoint", "step": saved.step, "path": saved.path.name, **times})
        self._saved = saved.step
        self._artist.draw_soon()

    def on_end(self, step: int, reason: str) -> None:
        self._log.write({"event": "end", "step": step, "reason": reason})

    def draw(self) -> None:
        """Draw the whole run. It takes seconds, so call it when no other rank waits any more."""
        self._artist.close()
        plot_loss(read_events(self._folder.events), self._folder.loss_plot, title=str(self._folder.path.name))

    def close(self) -> None:
        """Let go of the terminal, the event log and the process that draws."""
        self._display.close()
        self._artist.close()
        self._log.close()
