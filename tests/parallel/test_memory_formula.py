"""Live tensors between steps match the planner's memory formula for each ZeRO stage."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tools.live_memory import FULLEST, formula, planned_peak, planned_saving
from weft.config.plan import Plan

ROOT = Path(__file__).parents[2]


def generator():
    spec = importlib.util.spec_from_file_location("memory", ROOT / "docs" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(ranks2, ranks4):
    return generator().measure_all({2: ranks2, 4: ranks4})


def test_live_tensors_match_the_formula(measured):
    assert len(measured) == 22
    for plan, live in measured.items():
        want = formula(Plan.parse(plan))
        for part in ("params", "grads", "optimizer", "total"):
            assert getattr(live, part) == pytest.approx(getattr(want, part), rel=0.03), (plan, part)


@pytest.fixture(scope="module")
def saved(ranks2):
    return generator().measure_saved(ranks2)


@pytest.mark.full  # tests/parallel/test_saved_bytes.py checks one layer
def test_saved_bytes_of_plans_match_the_planner(saved):
    assert len(saved) == 12
    for plan, live in saved.items():
        assert live == pytest.approx(planned_saving(Plan.parse(plan)), rel=0.03), plan


@pytest.fixture(scope="module")
def peaks(ranks2):
    return generator().measure_peaks(ranks2)


@pytest.mark.full
def test_peak_memory_matches_the_planner(peaks):
    """Check peaks in the loss, with its logits, and in backward, with communication buffers."""
    for plan, live in peaks.items():
        planned = planned_peak(Plan.parse(plan))
        assert sum(planned.values()) == pytest.approx(live, rel=0.03), plan
        is_loss = "zero" not in plan and "recompute" not in plan
        assert planned["logits" if is_loss else "buffers"] > 0.05 * live, plan


@pytest.mark.full
def test_memory_page_is_current(measured, saved, peaks):
    written = (ROOT / "docs" / "reference" / "memory.md").read_text()
    page = generator().page(measured, saved, peaks)
    assert without_peaks(written) == without_peaks(page), "run: python docs/memory.py"


def without_peaks(page):
    """Remove the measured peaks, which depend on timing by a few hundred KiB."""
    text, found = re.subn(r"\| [\d.]+ \|(?=\n(\||$))", "|", page.split("## Peak of a step")[1])
    assert found == len(FULLEST)
    return page.split("## Peak of a step")[0] + text


def test_formula_for_chosen_plans():
    assert formula(Plan.parse("dp_shard=4 zero=1 precision=bf16")).total == 2 + 4 / 4 + 12 / 4
    assert formula(Plan.parse("dp_shard=4 zero=1 precision=bf16 accumulation=2")).total == 2 + 4 + 12 / 4
    assert formula(Plan.parse("dp_shard=8 zero=3 precision=bf16")).total == 16 / 8
    assert formula(Plan.parse("dp_replicate=8")).total == 16
