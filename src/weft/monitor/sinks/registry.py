"""Creation of sinks by kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import named_object

if TYPE_CHECKING:
    from weft.monitor.sinks.base import MetricSink, SinkJob

#: Sink class of each kind. It is imported when a config uses it.
SINKS = {
    "tensorboard": "weft.monitor.sinks.tensorboard_sink:TensorboardSink",
    "wandb": "weft.monitor.sinks.trackers:WandbSink",
    "trackio": "weft.monitor.sinks.trackers:TrackioSink",
    "mlflow": "weft.monitor.sinks.trackers:MlflowSink",
    "prometheus": "weft.monitor.sinks.prometheus_sink:ScrapedSink",
    "pushgateway": "weft.monitor.sinks.prometheus_sink:PushedSink",
    "otlp": "weft.monitor.sinks.trackers:OtlpSink",
    "http": "weft.monitor.sinks.trackers:JsonSink",
}


def make_sink(job: SinkJob) -> MetricSink:
    """Return the sink for a job.

    Raises:
        WeftError: if a package or a secret is missing, or if a URL is invalid.
        SinkTrouble: if it cannot start now.
    """
    return named_object(SINKS[job.settings.kind])(job)
