"""Where a run's figures go beside events.jsonl: one object a sink, one thread each, none of which holds up training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads, named_object

if TYPE_CHECKING:
    from weft.monitor.sinks.http_post import Poster
    from weft.monitor.sinks.pump import EventFollower, Pump
    from weft.monitor.sinks.request_limit import OpenSockets, OutOfTime, within
    from weft.monitor.sinks.secret import address_of, secret_of
    from weft.monitor.sinks.sink import FigureSink, SinkJob, SinkTrouble

__all__ = [
    "EventFollower",
    "OpenSockets",
    "OutOfTime",
    "Poster",
    "Pump",
    "SINKS",
    "FigureSink",
    "SinkJob",
    "SinkTrouble",
    "address_of",
    "make_sink",
    "secret_of",
    "within",
]

#: By kind, where its class is: none is loaded before it is wanted.
SINKS = {
    "tensorboard": "weft.monitor.sinks.tensorboard_sink:TensorboardSink",
    "wandb": "weft.monitor.sinks.tracker_sinks:WandbSink",
    "trackio": "weft.monitor.sinks.tracker_sinks:TrackioSink",
    "mlflow": "weft.monitor.sinks.mlflow_sink:MlflowSink",
    "prometheus": "weft.monitor.sinks.prometheus_sink:ScrapedSink",
    "pushgateway": "weft.monitor.sinks.prometheus_sink:PushedSink",
    "otlp": "weft.monitor.sinks.simple_sinks:OtlpSink",
    "http": "weft.monitor.sinks.simple_sinks:JsonSink",
}


def make_sink(job: SinkJob) -> FigureSink:
    """Return the sink that a job asks for.

    Raises:
        WeftError: where a package or a secret is missing.
        SinkTrouble: where it cannot begin now.
    """
    return named_object(SINKS[job.settings.kind])(job)


__getattr__ = loads(
    __name__,
    {
        "EventFollower": ".pump",
        "Poster": ".http_post",
        "Pump": ".pump",
        "OpenSockets": ".request_limit",
        "OutOfTime": ".request_limit",
        "FigureSink": ".sink",
        "SinkJob": ".sink",
        "SinkTrouble": ".sink",
        "address_of": ".secret",
        "secret_of": ".secret",
        "within": ".request_limit",
    },
)
