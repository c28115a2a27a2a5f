"""Private names of torch in the launcher. Read in torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


class StartedAgent(LocalElasticAgent):
    """torch's agent, telling which processes it started: `_start_workers` is where it learns their ids.

    begin: takes the process id of each local rank, before the agent looks after them. Further arguments are the
    agent's. Its public results name processes when they have ended.
    """

    def __init__(self, begin: Callable[[Mapping[int, int]], None], *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._begin = begin

    def result(self) -> RunResult | None:
        """Of `run`, which has no types. None where the rendezvous ended before the workers were started."""
        untyped: Any = self
        return untyped.run()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        untyped: Any = super()
        pids: dict[int, Any] = untyped._start_workers(worker_group)
        self._begin(pids)
        return pids
