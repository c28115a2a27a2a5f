"""What one `weft plan` command found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command's help loads no numpy
    from weft.planner.search import Answer, Candidate
    from weft.planner.tell import Comparison, Scenario, WhyNot


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that one command was asked for."""

    answer: Answer[Candidate]
    why_not: WhyNot | None = None
    comparison: Comparison | None = None
    scenarios: tuple[Scenario, ...] = ()

    @property
    def only_judges(self) -> bool:
        """Whether the user asked about certain plans and not for the best one."""
        return self.why_not is not None or self.comparison is not None
