"""Pipeline runtime: varying lengths, precisions, recompute, compile, saving, evaluation and memory."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.choice import gate_runs, todays
from tests.parallel.pipeline import cases
from tests.parity.pipeline_cases import GPT2, SCHEDULES
from weft.config.shapes.model_spec import ModelSpec


@pytest.mark.parametrize("schedule", todays(SCHEDULES))
def test_sequences_of_varying_lengths_match_one_process(schedule, ranks2):
    rounds = [[8, 5, 3, 8], [8, 5, 3, 8], [4, 8, 8, 2]]
    expected = cases.losses_of_lengths("accumulation=4 precision=fp64", rounds)
    for found in ranks2.run(cases.losses_of_lengths, f"pp=2 microbatches=4 precision=fp64 {schedule}", rounds):
        assert found == pytest.approx(expected, rel=1e-12)


EXTRAS = ["precision=bf16", "precision=fp16", "recompute=selective", "recompute=attention"]


@pytest.mark.parametrize("schedule, extra", todays(itertools.product(SCHEDULES, EXTRAS), parts=9))
def test_precisions_and_recompute_match_one_process(schedule, extra, ranks2):
    bound = {"precision=bf16": 2**-6, "precision=fp16": 2**-9}.get(extra, 1e-6)
    expected = cases.losses(f"accumulation=4 {extra}")
    for found in ranks2.run(cases.losses, f"pp=2 microbatches=4 {extra} {schedule}"):
        assert found == pytest.approx(expected, rel=bound)


@pytest.mark.parametrize(
    ("schedule", "groups"),
    todays([("schedule=interleaved virtual_stages=2", 4), ("schedule=dualpipe_v virtual_stages=2", 4)], parts=2),
)
def test_separate_groups_per_flow_change_no_bit(schedule, groups, ranks2):
    """Check the two-rank groups, one per content and direction, that NCCL would use, with gloo."""
    plan = f"pp=2 microbatches=4 {schedule}"
    expected = ranks2.run(cases.losses, plan)
    for (found, made), reference in zip(ranks2.run(cases.losses_with_group_per_flow, plan), expected, strict=True):
        assert found == reference
        assert made == [(0, 1)] * groups


@pytest.mark.parametrize("schedule", gate_runs(SCHEDULES, 1, -1))
def test_overflow_skips_the_step_on_all_stages(schedule, ranks2):
    expected = cases.overflows("accumulation=4 precision=fp16")
    assert [was_skipped for was_skipped, _ in expected] == [True, True]
    for found in ranks2.run(cases.overflows, f"pp=2 microbatches=4 precision=fp16 {schedule}"):
        assert found == expected


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_compiled_pipelines_match_one_process(schedule, ranks2):
    expected = cases.losses("accumulation=4")
    for found in ranks2.run(cases.losses, f"pp=2 microbatches=4 compile=on {schedule}"):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("plans", [
    ("pp=2 microbatches=4 precision=fp64", "dp_shard=2 zero=2 precision=fp64"),
    ("dp_replicate=2 precision=fp64", "pp=2 microbatches=4 schedule=zb_v virtual_stages=2 precision=fp64"),
])  # fmt: skip
def test_checkpoints_resume_with_and_without_a_pipeline(plans, ranks2):
    for straight, resumed in ranks2.run(cases.save_and_load, *plans):
        assert resumed == pytest.approx(straight, rel=1e-12)


@pytest.mark.parametrize(
    "schedule",
    todays(["schedule=1f1b", "schedule=interleaved virtual_stages=2", "schedule=zb_v virtual_stages=2"], parts=3),
)
def test_evaluation_matches_one_process(schedule, ranks2):
    loss, num_tokens = cases.evaluation("precision=fp64")
    for found in ranks2.run(cases.evaluation, f"pp=2 microbatches=4 precision=fp64 {schedule}"):
        assert found == (pytest.approx(loss, rel=1e-12), num_tokens)


def test_rank_has_only_its_stages(ranks4):
    found = ranks4.run(cases.parameters_of_rank, "pp=4 microbatches=4")
    names = [name for part, _, _ in found for name in part]
    assert len(set(names)) == len(names)
    assert [part[0].split(".")[0] for part, _, _ in found] == ["embed", "blocks", "blocks", "blocks"]
    assert found[3][0][-1] == "head.weight"
    assert sum(count for _, count, _ in found) == ModelSpec.of_decoder(GPT2).num_params
    assert {counts for _, _, counts in found} == {(2, 2, 2, 2)}


def test_stages_of_a_model_without_random_numbers_are_not_seeded(ranks2):
    assert ranks2.run(cases.needs_no_seeds, "pp=2 microbatches=4", False) == [True, True]
    assert ranks2.run(cases.needs_no_seeds, "pp=2 microbatches=4", True) == [False, False]


@pytest.mark.parametrize("schedule", ["schedule=1f1b", "schedule=zb_v virtual_stages=2"])
def test_initial_weights_do_not_depend_on_the_stages(schedule, ranks2):
    expected = cases.weights_by_name("", None)
    for found in ranks2.run(cases.weights_by_name, f"pp=2 microbatches=4 {schedule}", "meta"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", gate_runs(["weft", "llama"], 1))
def test_no_rank_ever_allocates_the_full_model(family, ranks4, tmp_path):
    """A stage is a quarter of the model, and its parameters exist twice while buckets are created and filled."""
    cases.write_weights(family, tmp_path)
    full_bytes = 4 * ModelSpec.of_decoder(cases.LARGE).num_params
    for built, loaded in ranks4.run(cases.peak_growths, "pp=4 microbatches=4", family, tmp_path):
        assert built < 0.7 * full_bytes
        assert loaded < 0.7 * full_bytes


@pytest.mark.parametrize("schedule", todays(gate_runs(SCHEDULES[1:], 0, -1), parts=2))
def test_sent_tensors_are_freed(schedule, ranks2):
    """Check that pending tensors do not grow with the number of microbatches."""
    few, many = (ranks2.run(cases.most_pending_sends, f"pp=2 microbatches={m} {schedule}") for m in (8, 24))
    assert max(many) == max(few) <= 8


def test_too_few_microbatches_are_rejected(ranks2):
    assert set(ranks2.run(cases.wrong_number, "pp=2 microbatches=4")) == {
        "microbatches=4: a step has that many microbatches, and got 1. Give 4."
    }
