"""Comparison of two plans: time by term, memory by class."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.rules.plan_rules import LASTING, check
from weft.errors import PlanError, Problem
from weft.planner.report.explanation import TERM_WORDS, differences, fit_words
from weft.planner.report.verdict import read_plan
from weft.planner.search.candidate import Candidate
from weft.planner.search.question import Question
from weft.planner.search.refine import changed_words, estimated
from weft.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two candidates of one question."""

    left: Candidate
    right: Candidate

    @property
    def time_rows(self) -> list[tuple[str, float, float]]:
        """(term, left, right) in seconds, largest difference first, without equal terms."""
        return differences(self.left.terms, self.right.terms)

    @property
    def memory_rows(self) -> list[tuple[str, float, float]]:
        """(class, left, right) in bytes, largest difference first, without equal classes."""
        return differences(self.left.memory, self.right.memory)

    def lines(self) -> list[str]:
        """Return the comparison as text."""
        left, right = self.left, self.right
        lines = [f"A       {left.plan}", f"B       {right.plan}"]
        lines.append(f"change  {changed_words(left.plan, right.plan) or 'none'}")
        lines.append(_row("", "A", "B", "B - A"))
        for name, before, after in self.time_rows:
            lines.append(_row(TERM_WORDS.get(name, name), *_seconds(before, after)))
        lines.append(_row("step", *_seconds(left.step_s, right.step_s)))
        for name, before, after in self.memory_rows:
            lines.append(_row(name, *_bytes(before, after)))
        lines.append(_row("memory", *_bytes(left.total_bytes, right.total_bytes)))
        lines.append(_row("", fit_words(left.fits), fit_words(right.fits), ""))
        lines.append(f"B takes {right.step_s / left.step_s - 1:+.1%} time and {_signed_bytes(self)} memory.")
        return lines


def compare(left: str, right: str, question: Question) -> Comparison:
    """Compare two plans, given as text.

    Args:
        left: plan A.
        right: plan B.
        question: the question for which they are compared.

    Raises:
        PlanError: if a text is not a plan or breaks a rule.
    """
    plans = [read_plan(text, question) for text in (left, right)]
    problems = [
        Problem(violation.field, f"{name}: {violation.message}")
        for name, plan in zip("AB", plans, strict=True)
        for violation in check(plan, question.facts, LASTING)
    ]
    if problems:
        raise PlanError(problems)
    return Comparison(*estimated(plans, question))


def _row(name: str, left: str, right: str, change: str) -> str:
    return f"  {name:<40} {left:>14} {right:>14} {change:>14}".rstrip()


def _seconds(before: float, after: float) -> tuple[str, str, str]:
    sign = "+" if after >= before else ""
    return format_seconds(before), format_seconds(after), f"{sign}{format_seconds(after - before)}"


def _bytes(before: float, after: float) -> tuple[str, str, str]:
    sign = "+" if after >= before else ""
    return format_bytes(before), format_bytes(after), f"{sign}{format_bytes(after - before)}"


def _signed_bytes(found: Comparison) -> str:
    return _bytes(found.left.total_bytes, found.right.total_bytes)[2]
