"""Communicators of a rank: lanes that schedules require, rank sets that axes share, and those of other software.

tests/tools/gpu_sim compares the counts with what ranks on the simulated GPU create and use.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.cluster import ClusterSpec
from weft.config.pipeline_schedule import build_schedule, flows
from weft.config.plan import SCHEDULES, Plan
from weft.config.shapes.model_spec import decoder_spec
from weft.planner.cost.machine import Tables
from weft.planner.cost.memory_terms import axis_groups, lanes
from weft.planner.estimator import estimate
from weft.planner.search.pipeline_clock import memory_by_rank
from weft.planner.search.question import Question
from weft.planner.search.refine import estimated
from weft.planner.space.columns import Columns, Job
from weft.planner.space.shape import Shape, Stack

JOB = Job(shape=Shape.of_decoder(decoder_spec("llama3-8b")), seq_len=8192, global_batch=128)
#: Bytes of a communicator.
EACH = Tables.of(ClusterSpec.parse("8xh100").device).communicator_gib * 2**30


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_each_content_and_direction_between_stages_has_a_lane(schedule, p):
    virtual = {"zb_v": 2, "dualpipe_v": 2, "interleaved": 3, "zb_interleaved": 2}.get(schedule, 1)
    columns = Columns.make(1, pp=p, num_micro=2 * p, schedule=SCHEDULES.index(schedule), virtual_stages=virtual)
    made = build_schedule(schedule, p, 2 * p, virtual)
    for rank in range(p):
        assert lanes(columns, rank)[0] == len(flows(made, rank))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("precision=bf16", 0),
        ("dp_shard=8 zero=1", 1),  # all are the default group
        ("dp_replicate=8", 1),
        ("tp=8", 1),
        ("tp=2 dp_shard=4 zero=1", 3),
        ("dp_replicate=2 dp_shard=4 zero=3", 3),
        ("dp_replicate=2 dp_shard=2 tp=2 zero=1", 5),
        ("dp_replicate=2 dp_shard=2 tp=2 zero=3", 6),
        ("pp=2 dp_shard=4 zero=1", 2),
        ("pp=2 tp=2 dp_shard=2 zero=1", 4),
    ],
)
def test_axes_with_equal_rank_sets_share_a_communicator(text, number):
    assert axis_groups(JOB, Columns.of([Plan.parse(text)], JOB), end=True)[0] == number


@pytest.mark.parametrize(("text", "more"), [("pp=2", 0), ("pp=3", 1), ("pp=2 tp=2", 1), ("tp=2", 0)])
def test_tied_ends_use_their_own_group_unless_it_has_all_ranks(text, more):
    tied = replace(JOB, shape=Shape.of_decoder(replace(decoder_spec("llama3-8b"), tied=True)))
    columns = Columns.of([Plan.parse(text)], JOB)
    inner, end = (axis_groups(tied, columns, end=end)[0] for end in (False, True))
    assert end - inner == more
    assert axis_groups(JOB, columns, end=True)[0] == inner


def communicators(text: str, stack: Stack) -> float:
    job = replace(JOB, stack=stack)
    columns = Columns.of([Plan.parse(text)], job)
    cluster = ClusterSpec.parse("2x8xh100")
    return estimate(job, cluster, columns, Tables.of(cluster.device)).memory["communicators"][0] / EACH


def test_rank_has_a_communicator_for_each_set_of_ranks():
    text = "pp=4 dp_shard=4 zero=1 microbatches=8 schedule=zb_v virtual_stages=2 precision=bf16"
    # All ranks and dp_shard; four lanes on the end stages, eight between them.
    assert communicators(text, Stack()) in (pytest.approx(6), pytest.approx(10))


def test_middle_rank_has_twice_the_lanes_of_an_end_rank():
    question = Question.of("llama3-8b", "4xh100", global_batch=64)
    plan = Plan.parse("pp=4 microbatches=16 precision=bf16 recompute=full")
    counts = [each["communicators"] / EACH for each in memory_by_rank(estimated([plan], question)[0])]
    assert counts == pytest.approx([3, 5, 5, 3])
