"""Sinks for trackers: JSON over HTTP, OTLP over HTTP, MLflow, Weights & Biases, trackio."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from weft.config.metrics import METRICS
from weft.errors import MissingExtra
from weft.monitor.events import step_of
from weft.monitor.metrics import MetricReading, readings
from weft.monitor.redact import without_secrets
from weft.monitor.sinks.base import MetricSink, Poster, SinkJob, SinkTrouble, flat_config, flat_values, secret_of


class JsonSink(MetricSink):
    """Sink that posts {"run": name, "events": [...]} to a URL. Configs in events have no secrets."""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._poster = Poster.of(job.settings)

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Post the events."""
        self._poster.post("", {"run": self.job.run, "events": list(map(_without_secrets, events))})


def _without_secrets(event: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**event, "config": without_secrets(event["config"])} if "config" in event else event


class OtlpSink(MetricSink):
    """Sink that posts metrics to URL/v1/metrics in OTLP's JSON format."""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._poster = Poster.of(job.settings)

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Post the metrics of the events."""
        points: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            for reading in readings(event):
                points.setdefault(reading.name, []).extend(self._points(reading))
        if not points:
            return
        attributes = [_text("service.name", "weft"), _text("weft.run", self.job.run)]
        metrics: list[dict[str, Any]] = []
        for name, found in points.items():
            metric = METRICS[name]
            # 2 is CUMULATIVE: counters are totals since the run began.
            kind = {"sum": {"dataPoints": found, "aggregationTemporality": 2, "isMonotonic": True}}
            data = kind if metric.grows else {"gauge": {"dataPoints": found}}
            unit = {"bytes": "By", "bytes/s": "By/s", "ratio": "1", "C": "Cel"}.get(metric.unit, metric.unit)
            metrics.append({"name": f"weft.{name}", "unit": unit, "description": metric.help, **data})
        scope = {"scope": {"name": "weft"}, "metrics": metrics}
        body = {"resourceMetrics": [{"resource": {"attributes": attributes}, "scopeMetrics": [scope]}]}
        path = "" if self.job.settings.url and self.job.settings.url.endswith("/v1/metrics") else "/v1/metrics"
        self._poster.post(path, body)

    def _points(self, reading: MetricReading) -> Iterator[dict[str, Any]]:
        label = METRICS[reading.name].label
        attributes = [_text(label, reading.label)] if label else []
        at = str(round(reading.time * 1e9)) if math.isfinite(reading.time) else "0"
        ends: list[tuple[str, float, str]] = [("", reading.value, "")]
        if reading.at_low or reading.at_high:
            ends = [("min", reading.low, reading.at_low), ("median", reading.value, ""),
                    ("max", reading.high, reading.at_high)]  # fmt: skip
        for stat, value, who in ends:
            more = [_text(key, word) for key, word in (("stat", stat), ("owner", who)) if word]
            yield {"timeUnixNano": at, "asDouble": _value(value), "attributes": [*attributes, *more]}


def _text(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


# MLflow through its REST API, so that the package is not needed on the training machine.

#: Request limits by MLflow's documentation.
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 500


class MlflowSink(MetricSink):
    """Sink that logs one run of Weft, over all its starts, as one MLflow run."""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._poster = Poster.of(job.settings)

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Send the metrics of the events. Start, failure and end events also update the run's status."""
        run = self.job.kept.get("run_id") or self._create(events)
        metrics = [
            {"key": name, "value": _value(value), "timestamp": round(event["time"] * 1000), "step": step_of(event) or 0}
            for event in events
            for name, value in flat_values(event).items()
        ]
        for first in range(0, len(metrics), _MOST_METRICS):
            self._call("runs/log-batch", {"run_id": run, "metrics": metrics[first : first + _MOST_METRICS]})
        for event in events:
            if event.get("event") == "end":
                status = "FINISHED" if event.get("reason") == "finished" else "KILLED"
                self._call("runs/update", {"run_id": run, "status": status, "end_time": round(event["time"] * 1000)})
            elif event.get("event") in ("start", "failure"):
                status = "RUNNING" if event["event"] == "start" else "FAILED"
                self._call("runs/update", {"run_id": run, "status": status})

    def _create(self, events: Sequence[Mapping[str, Any]]) -> str:
        began = round(float(events[0].get("time", 0.0)) * 1000)
        body = {"experiment_id": self._experiment(), "run_name": self.job.run, "start_time": began,
                "tags": [{"key": "weft.folder", "value": str(self.job.folder)}]}  # fmt: skip
        run = str(self._call("runs/create", body)["run"]["info"]["run_id"])
        params = [{"key": key, "value": str(value)[:_LONGEST_PARAM]} for key, value in flat_config(self.job.config)]
        for first in range(0, len(params), _MOST_PARAMS):
            self._call("runs/log-batch", {"run_id": run, "params": params[first : first + _MOST_PARAMS]})
        self.job.kept["run_id"] = run
        return run

    def _experiment(self) -> str:
        name = self.job.settings.project
        try:
            found = self._call(f"experiments/get-by-name?experiment_name={quote(name, safe='')}", None, method="GET")
            return str(found["experiment"]["experiment_id"])
        except SinkTrouble as trouble:
            if getattr(trouble, "status", 0) != 404:
                raise
        return str(self._call("experiments/create", {"name": name})["experiment_id"])

    def _call(self, path: str, body: Mapping[str, Any] | None, *, method: str = "POST") -> Any:
        answer = self._poster.post(f"/api/2.0/mlflow/{path}", body, method=method)
        return answer if isinstance(answer, dict) else {}


def _value(value: float) -> float | str:
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# Weights & Biases and trackio, through their packages, which share a few functions.


class _TrackerSink(MetricSink):
    """Sink that logs metrics with `log(values)`. The step is one of the values, because W&B rejects repeated steps."""

    package = ""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        try:
            self._library: Any = importlib.import_module(self.package)
        except ImportError as error:
            raise MissingExtra(self.package, self.package, f"sink.kind={self.package}") from error
        self._run: Any = None

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Log the metrics of the events."""
        try:
            if self._run is None:
                self._run = self._begin()
            for event in events:
                if values := flat_values(event):
                    self._log(values, step_of(event))
        except Exception as error:  # only its type is reported; its text may have secrets
            raise SinkTrouble(f"{self.package}: {type(error).__name__}") from None

    def close(self) -> None:
        """Finish the tracker's run. The next start continues it under the same id."""
        if self._run is not None:
            self._run.finish()

    def _begin(self) -> Any:
        raise NotImplementedError

    def _log(self, values: dict[str, float], step: int | None) -> None:
        self._run.log(values if step is None else {**values, "step": step})

    @property
    def _id(self) -> str:
        """Id of the tracker's run, equal for all starts: a hash of the run folder's path."""
        return hashlib.sha256(str(self.job.folder.resolve()).encode()).hexdigest()[:16]


class WandbSink(_TrackerSink):
    """Sink for a run of Weights & Biases. `WANDB_MODE=offline` stores it in the run folder, for `wandb sync`."""

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
    """Sink for a run of trackio."""

    package = "trackio"

    def _log(self, values: dict[str, float], step: int | None) -> None:
        self._run.log(values, step=step)  # trackio permits repeated steps, and reserves the name "step"

    def _begin(self) -> Any:
        return self._library.init(
            project=self.job.settings.project, name=f"{self.job.run}-{self._id[:6]}", resume="allow",
            config=dict(self.job.config), embed=False,
        )  # fmt: skip
