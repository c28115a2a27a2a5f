"""Between steps each stage keeps what the planner's formula says."""

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


def test_live_tensors_are_the_formula(measured):
    assert len(measured) == 22
    for plan, live in measured.items():
        want = formula(Plan.parse(plan))
        for part in ("params", "grads", "optimizer", "total"):
            assert getattr(live, part) == pytest.approx(getattr(want, part), rel=0.03), (plan, part)


@pytest.fixture(scope="module")
def saved(ranks2):
    return generator().measure_saved(ranks2)


@pytest.mark.full  # of one layer: tests/parallel/test_kept_bytes.py
def test_what_layers_keep_for_backward_is_what_the_planner_says(saved):
    assert len(saved) == 12
    for plan, live in saved.items():
        assert live == pytest.approx(planned_saving(Plan.parse(plan)), rel=0.03), plan


@pytest.fixture(scope="module")
def peaks(ranks2):
    return generator().measure_peaks(ranks2)


@pytest.mark.full
def test_the_fullest_moment_is_what_the_planner_says(peaks):
    """Of the loss, with its logits; and of backward, with what is on its way."""
    for plan, live in peaks.items():
        planned = planned_peak(Plan.parse(plan))
        assert sum(planned_peak(Plan.parse(plan), of_host=True).values()) == pytest.approx(live, rel=0.03), plan
        assert sum(planned.values()) == pytest.approx(live, rel=0.03), plan
        is_loss = "zero" not in plan and "recompute" not in plan
        assert planned["logits" if is_loss else "buffers"] > 0.05 * live, plan


@pytest.mark.full
def test_the_page_is_current(measured, saved, peaks):
    written = (ROOT / "docs" / "reference" / "memory.md").read_text()
    page = generator().page(measured, saved, peaks)
    assert without_peaks(written) == without_peaks(page), "run: python docs/memory.py"


def without_peaks(page):
    """What is on its way when backward is fullest depends on time, by a few hundred KiB."""
    text, found = re.subn(r"\| [\d.]+ \|(?=\n(\||$))", "|", page.split("## Peak of a step")[1])
    assert found == len(FULLEST)
    return page.split("## Peak of a step")[0] + text


def test_the_formula_at_its_corners():
    assert formula(Plan.parse("dp_shard=4 zero=1 precision=bf16")).total == 2 + 4 / 4 + 12 / 4
    assert formula(Plan.parse("dp_shard=4 zero=1 precision=bf16 accumulation=2")).total == 2 + 4 + 12 / 4
    assert formula(Plan.parse("dp_shard=8 zero=3 precision=bf16")).total == 16 / 8
    assert formula(Plan.parse("dp_replicate=8")).total == 16
