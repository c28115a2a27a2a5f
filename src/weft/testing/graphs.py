"""What torch.compile makes of a piece of code: graphs, breaks, and what it compiled anew. Exact, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch._dynamo import utils


@dataclass(slots=True)
class Graphs:
    """graphs: different ones that were compiled. breaks: reasons, and how often. recompiles: why, one for each."""

    graphs: int = 0
    breaks: dict[str, int] = field(default_factory=dict)
    recompiles: list[str] = field(default_factory=list)


@contextmanager
def counted_graphs() -> Iterator[Graphs]:
    """Forget what was compiled before, and count inside; the numbers are there when the block is left.

    What would be left uncompiled, for it was compiled anew too often, raises FailOnRecompileLimitHit.
    """
    found = Graphs()
    limit = torch._dynamo.config.fail_on_recompile_limit_hit
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.reset()
    utils.counters.clear()
    utils.clear_compilation_metrics()
    try:
        yield found
    finally:
        torch._dynamo.config.fail_on_recompile_limit_hit = limit
        found.graphs = utils.counters["stats"]["unique_graphs"]
        found.breaks = dict(utils.counters["graph_break"])
        reasons = [one.recompile_reason for one in utils.get_compilation_metrics()]
        found.recompiles = [reason for reason in reasons if reason]
