"""Private names of torch in the launcher. Read in torch 2.11 and 2.13."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

#: The agent notes the code of a process that it has collected at once (s).
_NOTED_S = 1.0


class StartedAgent(LocalElasticAgent):
    """torch's agent, telling which processes it started: `_start_workers` is where it learns their ids.

    begin: takes the process id of each local rank, before the agent looks after them, and a function that returns the
    exit code of one that the agent has collected. Further arguments are the agent's. Its public results name processes
    when they have ended.
    """

    def __init__(
        self, begin: Callable[[Mapping[int, int], Callable[[int], int | None]], None], *args: Any, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self._begin = begin

    def result(self) -> RunResult | None:
        """Of `run`, which has no types. None where the rendezvous ended before the workers were started."""
        untyped: Any = self
        return untyped.run()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        untyped: Any = super()
        pids: dict[int, Any] = untyped._start_workers(worker_group)
        self._begin(pids, self._collected)
        return pids

    def _collected(self, rank: int) -> int | None:
        """The exit code of a local rank that has ended; None where nothing is known of it."""
        untyped: Any = self
        handler = untyped._pcontext.subprocess_handlers.get(rank)
        try:
            # Not `returncode`: the agent may have collected the process and not noted its code yet.
            return None if handler is None else handler.proc.wait(_NOTED_S)
        except subprocess.TimeoutExpired:
            return None
