"""Rows of published tables: what was trained, on what, with which software, and what was measured."""

from __future__ import annotations

from weft.planner.scoring.rows.runs import PublishedRun, Skipped, read_runs
from weft.planner.scoring.rows.shapes import step_flops
from weft.planner.scoring.rows.stacks import StackRule, stack_rules

__all__ = ["PublishedRun", "Skipped", "StackRule", "read_runs", "stack_rules", "step_flops"]
