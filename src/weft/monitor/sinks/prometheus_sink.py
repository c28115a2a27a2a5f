"""Prometheus sinks: the newest metrics as text, to be scraped from /metrics or pushed to a gateway."""

from __future__ import annotations

import math
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from weft.config.metrics import METRICS
from weft.monitor.metrics import MetricReading, readings
from weft.monitor.sinks.base import MetricSink, Poster, SinkJob, SinkTrouble

#: Seconds between two pushes.
_PUSH_S = 5.0


class NewestMetrics:
    """Newest value of each metric of a run, per label, and their text for Prometheus. Thread-safe."""

    def __init__(self, run: str):
        self._run = run
        self._lock = threading.Lock()
        self._newest: dict[tuple[str, str], MetricReading] = {}
        self._failures: set[float] = set()  # times of the events, since an event may come twice

    def see(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Store the metrics of events. A failure event that comes twice is counted once."""
        found = [reading for event in events for reading in readings(event)]
        with self._lock:
            for reading in found:
                if reading.name == "failures":
                    self._failures.add(reading.time)
                    total = float(len(self._failures))
                    reading = MetricReading("failures", "", total, total, total, time=reading.time)
                self._newest[reading.name, reading.label] = reading

    def text(self) -> str:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        with self._lock:
            newest = dict(self._newest)
        lines: list[str] = []
        for metric in METRICS.values():
            found = [reading for (name, _), reading in newest.items() if name == metric.name]
            if not found:
                continue
            lines.append(f"# HELP {metric.exported} {_escaped(metric.help, quotes=False)}")
            lines.append(f"# TYPE {metric.exported} {'counter' if metric.grows else 'gauge'}")
            for reading in found:
                labels = {"run": self._run, **({metric.label: reading.label} if metric.label else {})}
                if reading.at_low or reading.at_high:
                    # The owner of an extreme is not a label, because the series would change whenever another rank is
                    # the slowest.
                    for stat, value in (("min", reading.low), ("median", reading.value), ("max", reading.high)):
                        lines.append(f"{metric.exported}{_labels({**labels, 'stat': stat})} {_number(value)}")
                else:
                    lines.append(f"{metric.exported}{_labels(labels)} {_number(reading.value)}")
        return "\n".join(lines) + "\n"


class ScrapedSink(MetricSink):
    """Sink that serves the newest metrics at /metrics.

    Raises:
        SinkTrouble: if it cannot listen on the host and port of the settings.
    """

    is_current = True

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._metrics = NewestMetrics(job.run)
        settings = job.settings
        try:
            self._server = ThreadingHTTPServer((settings.host, settings.port), _handler(self._metrics))
        except (OSError, OverflowError) as error:
            raise SinkTrouble(f"{settings.host}:{settings.port} cannot be used for listening ({error})") from None
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="weft-metrics", daemon=True).start()

    @property
    def port(self) -> int:
        """Port on which the server listens."""
        return self._server.server_address[1]

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Store the newest metrics."""
        self._metrics.see(events)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class PushedSink(MetricSink):
    """Sink that pushes the newest metrics to a gateway, at most every 5 s, and when it is closed."""

    is_current = True

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._metrics, self._poster = NewestMetrics(job.run), Poster.of(job.settings)
        project, run = (urllib.parse.quote(word, safe="") for word in (job.settings.project, job.run))
        self._path = f"/metrics/job/{project}/instance/{run}"
        self._pushed = -math.inf

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Store the newest metrics, and push them if the last push was at least 5 s ago."""
        self._metrics.see(events)
        if time.monotonic() - self._pushed >= _PUSH_S:
            self._push()

    def close(self) -> None:
        """Push the newest metrics a last time."""
        self._push()

    def _push(self) -> None:
        self._poster.post(self._path, self._metrics.text().encode(), method="PUT", kind="text/plain; version=0.0.4")
        self._pushed = time.monotonic()


def _handler(metrics: NewestMetrics) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10.0  # for a client that sends nothing

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = metrics.text().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Do not log scrapes, which come every few seconds."""

    return Handler


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(text: str, *, quotes: bool = True) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
