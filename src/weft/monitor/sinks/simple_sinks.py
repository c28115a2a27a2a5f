"""Sinks that post what is there: any HTTP endpoint as JSON, and a collector of OpenTelemetry by OTLP over HTTP."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.monitor.figures import FigureReading, readings
from weft.monitor.sinks.http_post import Poster
from weft.monitor.sinks.sink import FigureSink, SinkJob
from weft.spec.figures import FIGURES


class JsonSink(FigureSink):
    """Posts {"run": name, "events": [...]} to a URL. Each event is as in events.jsonl."""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._poster = Poster.of(job.settings)

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Post the events."""
        self._poster.post("", {"run": self.job.run, "events": list(events)})


class OtlpSink(FigureSink):
    """Posts figures to URL/v1/metrics in OTLP's JSON."""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._poster = Poster.of(job.settings)

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Post the figures of the events."""
        points: dict[str, list[dict[str, Any]]] = {}
        for event in events:
            for reading in readings(event):
                points.setdefault(reading.name, []).extend(self._points(reading))
        if not points:
            return
        attributes = [_text("service.name", "weft"), _text("weft.run", self.job.run)]
        metrics = [_metric(name, found) for name, found in points.items()]
        scope = {"scope": {"name": "weft"}, "metrics": metrics}
        body = {"resourceMetrics": [{"resource": {"attributes": attributes}, "scopeMetrics": [scope]}]}
        path = "" if self.job.settings.url and self.job.settings.url.endswith("/v1/metrics") else "/v1/metrics"
        self._poster.post(path, body)

    def _points(self, reading: FigureReading) -> Iterator[dict[str, Any]]:
        label = FIGURES[reading.name].label
        attributes = [_text(label, reading.label)] if label else []
        at = str(round(reading.time * 1e9)) if math.isfinite(reading.time) else "0"
        ends: list[tuple[str, float, str]] = [("", reading.value, "")]
        if reading.at_low or reading.at_high:
            ends = [("min", reading.low, reading.at_low), ("median", reading.value, ""),
                    ("max", reading.high, reading.at_high)]  # fmt: skip
        for stat, value, who in ends:
            more = [_text(key, word) for key, word in (("stat", stat), ("owner", who)) if word]
            yield {"timeUnixNano": at, "asDouble": _proto_double(value), "attributes": [*attributes, *more]}


def _metric(name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    figure = FIGURES[name]
    # CUMULATIVE: figures that grow are totals since the run began.
    kind = {"sum": {"dataPoints": points, "aggregationTemporality": 2, "isMonotonic": True}}
    data = kind if figure.grows else {"gauge": {"dataPoints": points}}
    unit = {"bytes": "By", "bytes/s": "By/s", "ratio": "1", "C": "Cel"}.get(figure.unit, figure.unit)
    return {"name": f"weft.{name}", "unit": unit, "description": figure.help, **data}


def _text(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "value": {"stringValue": value}}


def _proto_double(value: float) -> float | str:
    """As protobuf writes it in JSON."""
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"
