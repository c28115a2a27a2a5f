"""A simulated GPU: fake tensors on cuda:0 under the real code, with streams, counters and a race detector.

It cannot be unloaded from a process, so it always runs in one of its own: `script_on_paper`, `plans_on_paper`, or
`python -m weft.testing.paper`. docs/concepts/simulated_gpu.md says what that proves and what it cannot.
"""

from __future__ import annotations

from weft.testing.paper.process import Finished, PaperReport, plans_on_paper, script_on_paper
from weft.testing.paper.stub import why_not

__all__ = [
    "Finished",
    "PaperReport",
    "plans_on_paper",
    "script_on_paper",
    "why_not",
]
