"""Weights & Biases and trackio, through their own packages, which have the same few functions."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import MissingExtra
from weft.monitor.sinks.secret import secret_of
from weft.monitor.sinks.sink import FigureSink, SinkJob, SinkTrouble, flat_values


class _TrackerSink(FigureSink):
    """Logs figures with `log(values)`; the step is one of them, because W&B refuses steps that are done again."""

    package = ""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        try:
            self._library: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise MissingExtra(self.package, self.package, f"sink.kind={self.package}") from error
        self._run: Any = None

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Log the figures of the events."""
        try:
            if self._run is None:
                self._run = self._begin()
            for event in events:
                values, step = flat_values(event), event.get("step")
                if values:
                    self._log(values, step if type(step) is int else None)
        except Exception as error:  # whatever the package raises, its secret among the words of none of it
            raise SinkTrouble(f"{self.package}: {type(error).__name__}") from None

    def close(self) -> None:
        """End the tracker's run; it goes on under the same id at the next start."""
        if self._run is not None:
            self._run.finish()

    def _begin(self) -> Any:
        raise NotImplementedError

    def _log(self, values: dict[str, float], step: int | None) -> None:
        self._run.log(values if step is None else {**values, "step": step})

    @property
    def _id(self) -> str:
        """The same for all starts of a run: its place, and nothing of the machine."""
        return hashlib.sha256(str(self.job.folder.resolve()).encode()).hexdigest()[:16]


class WandbSink(_TrackerSink):
    """One run of Weights & Biases. `WANDB_MODE=offline` keeps it in the run folder, for `wandb sync`."""

    package = "wandb"

    def _begin(self) -> Any:
        settings: dict[str, Any] = {"silent": True, "console": "off"}
        if key := secret_of(self.job.settings.token, "sink wandb: token"):
            settings["api_key"] = key
        run = self._library.init(
            project=self.job.settings.project, name=self.job.run, id=self._id, resume="allow",
            dir=str(self.job.folder), config=dict(self.job.config), settings=self._library.Settings(**settings),
        )  # fmt: skip
        run.define_metric("*", step_metric="step")
        return run


class TrackioSink(_TrackerSink):
    """One run of trackio."""

    package = "trackio"

    def _log(self, values: dict[str, float], step: int | None) -> None:
        self._run.log(values, step=step)  # its own steps may repeat, and "step" is a name that it keeps for itself

    def _begin(self) -> Any:
        return self._library.init(
            project=self.job.settings.project, name=f"{self.job.run}-{self._id[:6]}", resume="allow",
            config=dict(self.job.config), embed=False,
        )  # fmt: skip
