"""Verdicts on plans, to the letter."""

from __future__ import annotations

import pytest

from tests.planner import stub
from weft.errors import PlanError
from weft.planner.search import best_plans as search
from weft.planner.search import moves
from weft.planner.search.best_plans import answer
from weft.planner.search.question import Question
from weft.planner.tell.comparison import compare
from weft.planner.tell.report import comparison_table, why_not_table
from weft.planner.tell.verdict import why_not
from weft.spec.rules.plan_rules import LASTING, check


@pytest.fixture
def question(monkeypatch) -> Question:
    monkeypatch.setattr(moves, "estimate", stub.estimate)
    monkeypatch.setattr(search, "estimate", stub.estimate)
    monkeypatch.setattr(search, "estimate_memory", stub.estimate)
    return Question.of(
        "llama3-8b",
        "8xh100",
        seq_len=8192,
        global_batch=64,
        built_only=False,
        fixed="precision=bf16 compile=off pp=1 cp=1",
    )


def told(question: Question, plan: str) -> str:
    return "\n".join(why_not(plan, question, answer(question)).lines())


def test_out_of_memory_in_numbers_with_the_smallest_changes(question):
    assert told(question, "dp_replicate=8 precision=bf16") == (
        "plan    dp_replicate=8 precision=bf16\n"
        "why not out of memory on the fullest rank: 131 GiB of 80.0 GiB, 51.0 GiB too much (does not fit).\n"
        "        optimizer 60.0 GiB, activations 60.0 GiB, parameters 10.0 GiB.\n"
        "changes that fit, the smallest first\n"
        "  offload=optimizer                            10.1 s a step, +0.0% time; 71.0 GiB, fits (99%)\n"
        "  recompute=full                               13.1 s a step, +29.6% time; 77.0 GiB, fits (99%)\n"
        "  dp_replicate=4 tp=2 accumulation=2           10.8 s a step, +6.2% time; 66.0 GiB, fits (99%)\n"
        "best    dp_replicate=8 precision=bf16 offload=optimizer\n"
        "        10.1 s a step, +0.0% time; 71.0 GiB, fits (99%)"
    )


def test_a_broken_rule_is_told_first_with_the_plan_that_mends_it(question):
    text = told(question, "dp_replicate=4 tp=2 zero=3 precision=bf16 accumulation=16")
    assert text.splitlines()[:4] == [
        "plan    dp_replicate=4 tp=2 zero=3 accumulation=16 precision=bf16",
        "why not zero=3: ZeRO shards over dp_shard and cp, and both are 1. Use zero=0, or dp_shard=2 or more.",
        "changes that mend it, the smallest first",
        "  without zero                                 12.5 s a step; 39.8 GiB, fits (99%)",
    ]


def test_a_plan_that_is_only_slower_shows_where(question):
    lines = told(question, "dp_shard=8 zero=1 accumulation=8 precision=bf16 recompute=full").splitlines()
    assert lines[1].startswith("why not it runs and fits (99%), and takes 14.0 s a step, ")
    assert "        recompute: +3.00 s" in lines
    assert any(line.startswith("  recompute=none ") for line in lines)


def test_the_best_plan_is_called_so(question):
    found = answer(question)
    verdict = why_not(str(found.best.plan), question, found)
    assert verdict.kind == "best"
    assert verdict.lines()[1] == "why not this is the best plan: no other plan that was tried is faster."


def test_changes_that_fit_do_fit_and_keep_the_rules():
    question = Question.of("llama3-70b", "2x8xh100", built_only=False)
    verdict = why_not("dp_replicate=16 precision=bf16 accumulation=2", question, answer(question))
    assert verdict.kind == "memory"
    assert verdict.remedies
    counts = [len(remedy.words.split()) for remedy in verdict.remedies]
    assert counts == sorted(counts)
    for remedy in verdict.remedies:
        assert remedy.after.fits >= question.fits
        assert not check(remedy.after.plan, question.facts, LASTING)
    assert why_not_table(verdict)["remedies"][0]["change"] == verdict.remedies[0].words


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("dp_shrad=8", "unknown plan field 'dp_shrad'. Did you mean 'dp_shard'?"),
        ("tp", "plan word 'tp': a plan consists of name=value words."),
        ("cp=2 cp_mode=rings", "cp_mode=rings: not one of auto, gather, ring, ulysses. Did you mean 'ring'?"),
        ("dp_replicate=* tp=3", "dp_replicate=*: the other axes need 3 ranks, and 8 is not a multiple of 3."),
    ],
)
def test_text_that_is_no_plan(question, plan, message):
    with pytest.raises(PlanError) as caught:
        why_not(plan, question, answer(question))
    assert message in str(caught.value)


def test_two_plans_beside_each_other(question):
    found = compare(
        "dp_shard=8 zero=1 accumulation=8 precision=bf16", "dp_shard=4 tp=2 zero=1 precision=bf16", question
    )
    assert "\n".join(found.lines()) == (
        "A       dp_shard=8 zero=1 accumulation=8 precision=bf16\n"
        "B       dp_shard=4 tp=2 zero=1 precision=bf16\n"
        "change  dp_shard=4 tp=2 accumulation=1\n"
        "                                                        A              B          B - A\n"
        "  waiting for the host                             1.00 s         125 ms        -875 ms\n"
        "  tensor-parallel traffic                             0 s         500 ms        +500 ms\n"
        "  step                                             11.0 s         10.6 s        -375 ms\n"
        "  activations                                    7.50 GiB       60.0 GiB      +52.5 GiB\n"
        "  parameters                                     10.0 GiB       5.00 GiB      -5.00 GiB\n"
        "  memory                                         26.0 GiB       73.5 GiB      +47.5 GiB\n"
        "                                               fits (99%)     fits (99%)\n"
        "B takes -3.4% time and +47.5 GiB memory."
    )
    assert comparison_table(found)["time"][0] == {"term": "host", "a_s": 1.0, "b_s": 0.125}


def test_plans_that_break_rules_are_not_compared(question):
    with pytest.raises(PlanError, match="B: tp=3: the model has 32 heads"):
        compare("dp_replicate=8", "tp=3", question)
