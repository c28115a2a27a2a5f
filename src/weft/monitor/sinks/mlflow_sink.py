"""MLflow through its REST interface, so that the package need not be installed where training runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from weft.monitor.sinks.http_post import Poster
from weft.monitor.sinks.sink import FigureSink, SinkJob, SinkTrouble, flat_config, flat_values

#: What a request may hold at most, by MLflow's documentation.
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 500


class MlflowSink(FigureSink):
    """One run of MLflow for one run of Weft, over all its starts."""

    def __init__(self, job: SinkJob):
        super().__init__(job)
        self._poster = Poster.of(job.settings)

    def send(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Log the figures of the events; at an end also how the run stands."""
        run = self.job.kept.get("run_id") or self._create(events)
        metrics = [
            {"key": name, "value": _value(value), "timestamp": round(event["time"] * 1000), "step": _step(event)}
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
            found = self._call(f"experiments/get-by-name?experiment_name={_quoted(name)}", None, method="GET")
            return str(found["experiment"]["experiment_id"])
        except SinkTrouble as trouble:
            if getattr(trouble, "status", 0) != 404:
                raise
        return str(self._call("experiments/create", {"name": name})["experiment_id"])

    def _call(self, path: str, body: Mapping[str, Any] | None, *, method: str = "POST") -> Any:
        answer = self._poster.post(f"/api/2.0/mlflow/{path}", body, method=method)
        return answer if isinstance(answer, dict) else {}


def _step(event: Mapping[str, Any]) -> int:
    step = event.get("step")
    return step if type(step) is int else 0


def _value(value: float) -> float | str:
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _quoted(text: str) -> str:
    import urllib.parse

    return urllib.parse.quote(text, safe="")
