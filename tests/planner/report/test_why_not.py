"""Verdicts on plans, compared literally."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner import stub
from weft.config.cluster import ClusterSpec, device
from weft.config.rules.plan_rules import LASTING, check
from weft.errors import ConfigError, PlanError, WeftError
from weft.planner.report.tables import comparison_table, why_not_table
from weft.planner.report.verdict import compare, nearest_yes, why_not
from weft.planner.search import best_plans as search
from weft.planner.search import refine as moves
from weft.planner.search.best_plans import answer
from weft.planner.search.question import Question


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


def verdict_text(question: Question, plan: str) -> str:
    return "\n".join(why_not(plan, question, answer(question)).lines())


def test_out_of_memory_in_numbers_with_the_smallest_changes(question):
    assert verdict_text(question, "dp_replicate=8 precision=bf16") == (
        "plan    dp_replicate=8 precision=bf16\n"
        "why not out of memory on the fullest rank: 131 GiB of 80.0 GiB, 51.0 GiB too much (does not fit).\n"
        "        optimizer 60.0 GiB, activations 60.0 GiB, parameters 10.0 GiB.\n"
        "changes that fit, the smallest first\n"
        "  offload=optimizer                            10.1 s a step, +0.0% time; 71.0 GiB, fits (99%)\n"
        "  accumulation=8                               11.0 s a step, +8.6% time; 78.5 GiB, fits (99%)\n"
        "  recompute=full                               13.1 s a step, +29.6% time; 77.0 GiB, fits (99%)\n"
        "  dp_replicate=4 tp=2 accumulation=2           10.8 s a step, +6.2% time; 66.0 GiB, fits (99%)\n"
        "best    dp_shard=8 zero=1 precision=bf16\n"
        "        10.1 s a step, +0.0% time; 78.5 GiB, fits (99%)"
    )


def test_almost_fitting_plan_gets_the_least_recompute():
    asked = Question.of("llama3-405b", "16384xh100", seq_len=8192, global_batch=4096)
    plan = "tp=8 sp=on pp=16 dp_shard=128 zero=2 precision=bf16 compile=on microbatches=32 schedule=interleaved"
    found = why_not(f"{plan} virtual_stages=4", asked, answer(asked))
    assert "recompute=full:2" in {remedy.words for remedy in found.remedies}


def test_broken_rule_comes_first_with_a_plan_that_fixes_it(question):
    text = verdict_text(question, "dp_replicate=4 tp=2 zero=3 precision=bf16 accumulation=16")
    assert text.splitlines()[:4] == [
        "plan    dp_replicate=4 tp=2 zero=3 accumulation=16 precision=bf16",
        "why not zero=3: ZeRO shards over dp_shard and cp, and both are 1. "
        "Use dp_shard=4 tp=2 zero=3 accumulation=16 precision=bf16, or zero=0.",
        "changes that mend it, the smallest first",
        "  without dp_replicate dp_shard=4              12.5 s a step; 17.2 GiB, fits (99%)",
    ]


def test_slower_plan_shows_the_terms_that_differ(question):
    lines = verdict_text(question, "dp_shard=8 zero=1 accumulation=8 precision=bf16 recompute=full").splitlines()
    assert lines[1].startswith("why not it runs and fits (99%), and takes 14.0 s a step, ")
    assert "        recompute: +3.00 s" in lines
    assert any(line.startswith("  recompute=none ") for line in lines)


def test_best_plan_is_identified(question):
    found = answer(question)
    verdict = why_not(str(found.best.plan), question, found)
    assert verdict.kind == "best"
    assert verdict.lines()[1] == "why not this is the best plan: no other plan that was tried is faster."


def test_suggested_changes_fit_and_satisfy_the_rules():
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
        ("tp", "plan field 'tp': a plan consists of name=value fields."),
        ("cp=2 cp_mode=rings", "cp_mode=rings: not one of auto, gather, ring, ulysses. Did you mean 'ring'?"),
        ("dp_replicate=* tp=3", "dp_replicate=*: the other axes need 3 ranks, and 8 is not a multiple of 3."),
    ],
)
def test_invalid_plan_text_is_rejected(question, plan, message):
    with pytest.raises(PlanError) as caught:
        why_not(plan, question, answer(question))
    assert message in str(caught.value)


def test_two_plans_are_compared(question):
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


def test_plan_without_precision_is_fp32_with_a_note(question):
    assert (
        "        the plan names no precision, so it is one in fp32. Add precision=bf16 for one in half precision."
        in verdict_text(question, "dp_replicate=8").splitlines()
    )
    assert "names no precision" not in verdict_text(question, "dp_replicate=8 precision=bf16")


@pytest.mark.parametrize("plan", ["dp_replicate=4 tp=2 zero=3 precision=bf16", "dp_replicate=8 zero=2 precision=bf16"])
def test_changes_that_fix_a_rule_also_fit(question, plan):
    """A legal plan that does not fit is not a remedy: each listed one fits."""
    found = why_not(plan, question, answer(question))
    assert found.kind == "rule"
    assert found.remedies
    for each in found.remedies:
        assert each.after.fits >= question.fits
        assert not check(each.after.plan, question.facts, question.rules)


def test_fixed_axis_that_does_not_divide_the_devices_is_rejected_early():
    with pytest.raises(ConfigError, match=r"fix=tp=3: 8 devices are no multiple of 3. Use a divisor: 1, 2, 4, 8."):
        Question.of("llama3-8b", "8xh100", fixed="tp=3")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ClusterSpec.parse("h100x8"), "cluster=h100x8: the number comes before the device. Write '8xh100'."),
        (lambda: ClusterSpec.parse("h100:8"), "cluster=h100:8: the number comes before the device. Write '8xh100'."),
        (
            lambda: ClusterSpec.parse("2x8h100"),
            "cluster=2x8h100: a cluster is [nodes x] devices x name. Write '2x8xh100'.",
        ),
        (
            lambda: ClusterSpec.parse("8 x 4090"),
            "cluster=8 x 4090: a cluster is [nodes x] devices x name. Write '8x4090'.",
        ),
        (lambda: ClusterSpec.parse("h200x8x2"), "Write '8x2xh200'."),
        (lambda: Question.of("llama3-8b", "8xh100", fixed="dp=4"), "unknown plan field 'dp'. Write dp_shard=N"),
        (lambda: Question.of("llama3-8b", "8xh100", global_batch=0), "Use e.g. --global-batch 128."),
    ],
)
def test_terms_of_other_tools_get_a_hint(call, text):
    with pytest.raises(WeftError) as caught:
        call()
    assert text in str(caught.value)


def test_small_device_is_offered_an_adapter_and_the_same_vendor():
    """A 7B model on one card of 24 GB: an adapter; larger devices are of the same vendor."""
    asked = Question.of("llama2-7b", "1xrtx4090", seq_len=1024, global_batch=4, most_plans=4000)
    found = nearest_yes(asked)
    assert found[0].text.startswith("adapter=16")
    makers = [one.question.cluster.device.title.partition(" ")[0] for one in found]
    assert set(makers) == {"NVIDIA"}
    assert all(one.question.cluster.device.peak_flops("bf16") for one in found)


def test_24_gb_card_fits_an_8b_adapter_with_large_vocabulary():
    """The head is frozen, so its loss computes no gradient of 128 thousand rows."""
    asked = Question.of("llama3-8b", "1xrtx4090", most_plans=4000)
    (text, *_) = [one.text for one in nearest_yes(asked)]
    assert text == "adapter=16"


def test_remedies_without_precision_use_half_precision():
    asked = Question.of("llama3-8b", "8xh100", most_plans=20_000)
    remedies = why_not("dp_shard=8 zero=3 accumulation=16", asked, answer(asked)).remedies
    assert remedies
    assert all("precision=bf16" in each.words.split() for each in remedies)


def test_unfixable_plan_shows_the_closest_ones():
    asked = Question.of("llama3-8b", "6xh100", most_plans=4000)
    found = why_not("dp_shard=2 tp=3 zero=1 precision=bf16", asked, answer(asked))
    assert found.sentence == "tp=3: the model has 32 heads, and 32 is not a multiple of 3. Use tp=1 or 2."
    assert found.remedies
    for each in found.remedies:
        assert each.after.plan.world_size == 6
        assert each.after.fits >= asked.fits


def test_unsatisfiable_fixed_fields_are_dropped():
    asked = Question.of("llama3-8b", "6xh100", fixed="tp=3 precision=bf16", most_plans=4000)
    (only,) = nearest_yes(asked)
    assert only.text == "without tp=3"
    assert only.answer.best.plan.tp < 3


def test_custom_devices_are_scaled_up_too():
    known = device("rtx4090")
    own = ClusterSpec(nodes=1, devices_per_node=1, device=replace(known, name="rtx4090*", watts=300.0))
    asked = Question.of("llama2-7b", own, seq_len=1024, global_batch=4, most_plans=4000)
    assert any(one.text == "cluster=1x4xrtx4090*" for one in nearest_yes(asked))
