"""The acceptance suite itself, at small size on the CPU, so that a run on a GPU does not fail over a typing error."""

from __future__ import annotations

import pytest
import torch

from tests.choice import todays
from tests.gpu.cases import Case, Setting, judge
from tests.gpu.run import STAGES

#: They start commands: tens of seconds.
_SLOW = ("weft train, resume, doctor", "the first example", "1 B at 4k", "1 B at 8k", "8 B cut to 8 layers at 8k")
_SLOW += ("four ranks", "tied ends of a pipeline", "one graph for all blocks", "local SGD")
_SLOW += ("stages of two chains", "encoders with decoders")


@pytest.mark.parametrize(
    "case",
    todays(
        [
            pytest.param(case, id=case.name, marks=[pytest.mark.full] if case.name in _SLOW else [])
            for cases in STAGES.values()
            for case in cases
        ],
        parts=2,
    ),
)
def test_case_runs_on_the_cpu(case: Case, tmp_path):
    outcome = judge(case, Setting(torch.device("cpu"), small=True, folder=tmp_path))
    assert outcome.verdict in ("passed", "skipped"), outcome.text
    assert outcome.verdict == "passed" or "needs" in outcome.text


def test_failing_case_is_reported(tmp_path):
    def broken(setting: Setting):
        raise ValueError("boom")

    outcome = judge(Case("correct", "broken", broken), Setting(torch.device("cpu"), small=True, folder=tmp_path))
    assert (outcome.verdict, "boom" in outcome.text) == ("failed", True)
