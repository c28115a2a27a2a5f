"""What a pipeline must bear: other lengths, formats, recompute, compile, saving, evaluation; and little memory."""

from __future__ import annotations

import pytest
import torch

from tests.choice import gate_runs, product
from tests.parallel.pipeline import cases
from tests.parity.pipeline_cases import GPT2, SCHEDULES
from weft.config.model_spec import ModelSpec


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sequences_of_other_lengths(schedule, ranks2):
    rounds = [[8, 5, 3, 8], [8, 5, 3, 8], [4, 8, 8, 2]]
    expected = cases.losses_of_lengths("accumulation=4 precision=fp64", rounds)
    for found in ranks2.run(cases.losses_of_lengths, f"pp=2 microbatches=4 precision=fp64 {schedule}", rounds):
        assert found == pytest.approx(expected, rel=1e-12)


EXTRAS = ["precision=bf16", "precision=fp16", "recompute=selective", "recompute=attention"]


@pytest.mark.parametrize(*product("schedule, extra", SCHEDULES, EXTRAS))
def test_formats_and_recompute(schedule, extra, ranks2):
    bound = {"precision=bf16": 2**-6, "precision=fp16": 2**-9}.get(extra, 1e-6)
    expected = cases.losses(f"accumulation=4 {extra}")
    for found in ranks2.run(cases.losses, f"pp=2 microbatches=4 {extra} {schedule}"):
        assert found == pytest.approx(expected, rel=bound)


@pytest.mark.parametrize(
    ("schedule", "groups"), [("schedule=interleaved virtual_stages=2", 4), ("schedule=dualpipe_v virtual_stages=2", 4)]
)
def test_lanes_change_no_bit(schedule, groups, ranks2):
    """NCCL's messages go over groups of two, one for each content and direction. Here gloo carries the same ones."""
    plan = f"pp=2 microbatches=4 {schedule}"
    expected = ranks2.run(cases.losses, plan)
    for (found, made), alone in zip(ranks2.run(cases.losses_over_lanes, plan), expected, strict=True):
        assert found == alone
        assert made == [(0, 1)] * groups


@pytest.mark.parametrize("schedule", gate_runs(SCHEDULES, 1, -1))
def test_a_step_that_overflows_is_skipped_by_all_stages(schedule, ranks2):
    expected = cases.overflows("accumulation=4 precision=fp16")
    assert [was_skipped for was_skipped, _ in expected] == [True, True]
    for found in ranks2.run(cases.overflows, f"pp=2 microbatches=4 precision=fp16 {schedule}"):
        assert found == expected


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiled_blocks(schedule, ranks2):
    expected = cases.losses("accumulation=4")
    for found in ranks2.run(cases.losses, f"pp=2 microbatches=4 compile=on {schedule}"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("plans", [
    ("pp=2 microbatches=4 precision=fp64", "dp_shard=2 zero=2 precision=fp64"),
    ("dp_replicate=2 precision=fp64", "pp=2 microbatches=4 schedule=zb_v virtual_stages=2 precision=fp64"),
])  # fmt: skip
def test_what_one_plan_saves_another_goes_on_with(plans, ranks2):
    for straight, resumed in ranks2.run(cases.save_and_load, *plans):
        assert resumed == pytest.approx(straight, rel=1e-12)


@pytest.mark.parametrize(
    "schedule", ["schedule=1f1b", "schedule=interleaved virtual_stages=2", "schedule=zb_v virtual_stages=2"]
)
def test_evaluation(schedule, ranks2):
    loss, num_tokens = cases.evaluation("precision=fp64")
    for found in ranks2.run(cases.evaluation, f"pp=2 microbatches=4 precision=fp64 {schedule}"):
        assert found == (pytest.approx(loss, rel=1e-12), num_tokens)


def test_a_rank_holds_its_stages_only(ranks4):
    found = ranks4.run(cases.held_on_ranks, "pp=4 microbatches=4")
    names = [name for part, _, _ in found for name in part]
    assert len(set(names)) == len(names)
    assert [part[0].split(".")[0] for part, _, _ in found] == ["embed", "blocks", "blocks", "blocks"]
    assert found[3][0][-1] == "head.weight"
    assert sum(count for _, count, _ in found) == ModelSpec.of_decoder(GPT2).num_params
    assert {counts for _, _, counts in found} == {(2, 2, 2, 2)}


@pytest.mark.parametrize("schedule", ["schedule=1f1b", "schedule=zb_v virtual_stages=2"])
def test_weights_do_not_depend_on_the_stages(schedule, ranks2):
    expected = cases.weights_by_name("", None)
    for found in ranks2.run(cases.weights_by_name, f"pp=2 microbatches=4 {schedule}", "meta"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", gate_runs(["weft", "llama"], 1))
def test_no_rank_ever_holds_the_whole_model(family, ranks4, tmp_path):
    """A stage is a quarter; while buckets are made, and while one is filled, its parameters are there twice."""
    cases.write_weights(family, tmp_path)
    whole = 4 * ModelSpec.of_decoder(cases.LARGE).num_params
    for built, loaded in ranks4.run(cases.peak_growths, "pp=4 microbatches=4", family, tmp_path):
        assert built < 0.7 * whole
        assert loaded < 0.7 * whole


@pytest.mark.parametrize("schedule", gate_runs(SCHEDULES[1:], 0, -1))
def test_what_was_sent_is_let_go(schedule, ranks2):
    """What is kept does not grow with the microbatches."""
    few, many = (ranks2.run(cases.most_kept_for_sending, f"pp=2 microbatches={m} {schedule}") for m in (8, 24))
    assert max(many) == max(few) <= 8


def test_too_few_microbatches(ranks2):
    assert set(ranks2.run(cases.wrong_number, "pp=2 microbatches=4")) == {
        "microbatches=4: a step has that many microbatches, and got 1. Give 4."
    }
