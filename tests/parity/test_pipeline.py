"""Every pipeline schedule matches one process: loss, norm, gradients, weights."""

from __future__ import annotations

import dataclasses

import pytest

from tests.choice import gate_runs
from tests.parity.pipeline_cases import SCHEDULES, cases, expert_cases, families
from weft.verify.parity import train_cases

RTOL = 1e-10


class Trained(dict):
    """Results of one process by name, computed on demand."""

    def __init__(self, chosen):
        super().__init__()
        self.chosen = chosen

    def __missing__(self, name):
        self |= train_cases("precision=fp64", {name: self.chosen[name]})
        return self[name]


@pytest.fixture(scope="module")
def references():
    return train_cases("precision=fp64", cases())


@pytest.fixture(scope="module")
def family_references():
    return Trained(families())


#: Tied weights between the ends of the pipeline, and stages without gradients. Other models add nothing on four ranks.
SOME = ("tied", "frozen")


def some_cases():
    return {name: case for name, case in cases().items() if name in SOME}


def compare(ranks, plan, chosen, references):
    for results in ranks.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in results.items():
            assert result.largest_difference(references[name]) < RTOL, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_matches_one_process_on_two_ranks(schedule, references, ranks2):
    compare(ranks2, f"pp=2 microbatches=4 {schedule}", cases(), references)


#: On four ranks, middle stages have two neighbors. Two ranks cover the differences between schedules.
DEEP = ("schedule=dualpipe_v virtual_stages=2",)


@pytest.mark.parametrize(
    "schedule", [pytest.param(one, marks=() if one in DEEP else pytest.mark.full) for one in SCHEDULES]
)
def test_schedule_matches_one_process_on_four_ranks(schedule, references, ranks4):
    compare(ranks4, f"pp=4 microbatches=8 {schedule}", some_cases(), references)


DATA = ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=1 recompute=full"]


@pytest.mark.parametrize("schedule", gate_runs(["schedule=zb_h1", "schedule=zb_v virtual_stages=2"], 1))
@pytest.mark.parametrize("data", gate_runs(DATA, 3))
def test_pipeline_with_data_parallel_matches_one_process(schedule, data, references, ranks4):
    compare(ranks4, f"pp=2 microbatches=4 {data} {schedule}", some_cases(), references)


#: Recompute and offload by rank of the pipeline.
BY_RANK = [
    "pp=2 microbatches=4 dp_shard=2 zero=2 shares=3+1 recompute=selective+none offload=optimizer:1/0",
    "pp=2 microbatches=4 dp_shard=2 zero=1 recompute=none+full:1 offload=optimizer:0/0.5",
    "pp=2 microbatches=4 dp_shard=2 zero=3 reshard=after_step recompute=full+none offload=optimizer:0.5/1",
    "pp=2 microbatches=4 dp_replicate=2 virtual_stages=2 schedule=interleaved recompute=full+attention",
]


@pytest.mark.parametrize("plan", gate_runs(BY_RANK, 2))
def test_recompute_and_offload_by_rank_match_one_process(plan, references, ranks4):
    compare(ranks4, plan, some_cases(), references)


@pytest.fixture(scope="module")
def expert_references():
    return train_cases("precision=fp64", expert_cases())


@pytest.mark.parametrize("plan", [
    pytest.param("dp_shard=2 ep=2 zero=1 schedule=zb_h1", marks=pytest.mark.full),
    pytest.param("dp_shard=2 ep=2 zero=2 schedule=zb_v virtual_stages=2", marks=pytest.mark.full),
    pytest.param("dp_shard=2 ep=2 zero=1 schedule=dualpipe_v virtual_stages=2 recompute=full", marks=pytest.mark.full),
    pytest.param("cp=2 ep=2 schedule=interleaved virtual_stages=2", marks=pytest.mark.full),
    "tp=2 ep=2 sp=on schedule=zb_interleaved virtual_stages=2",
    pytest.param("dp_replicate=2 recompute=selective schedule=gpipe", marks=pytest.mark.full),
])  # fmt: skip
def test_pipeline_with_experts_matches_one_process(plan, expert_references, ranks4):
    compare(ranks4, f"pp=2 microbatches=4 {plan}", expert_cases(), expert_references)


@pytest.mark.parametrize(
    "schedule", [pytest.param("schedule=1f1b", marks=pytest.mark.full), "schedule=zb_v virtual_stages=2"]
)
def test_pipeline_with_sharded_sequences_matches_one_process(schedule, references, family_references, ranks4):
    """Weft's decoders pass sharded tokens between stages, others gather them between stages."""
    plan = f"pp=2 tp=2 sp=on microbatches=4 {schedule}"
    compare(ranks4, plan, {name: case for name, case in cases().items() if name in ("tied", "gpt2")}, references)
    compare(ranks4, plan, {"llama": families()["llama"]}, family_references)


#: Families of the gate: positions of blocks' own, learned or as a bias, and layers of two kinds.
FAMILIES = ("llama", "gpt2", "bloom", "gemma3_text")


@pytest.mark.parametrize(
    ("names", "schedule"),
    gate_runs([(FAMILIES, "schedule=1f1b"), (tuple(families()), "schedule=1f1b"),
               (tuple(families()), "schedule=zb_v virtual_stages=2")], 0),
)  # fmt: skip
def test_hugging_face_pipelines_match_one_process(names, schedule, family_references, ranks2):
    chosen = {name: families()[name] for name in names}
    compare(ranks2, f"pp=2 microbatches=4 {schedule}", chosen, family_references)


@pytest.mark.parametrize("zero", gate_runs([0, 1, 2], 2))
def test_gradients_are_reduced_once_per_step(zero, ranks4):
    """Compare the reduced bytes for different numbers and orders of microbatches."""
    data = f"pp=2 dp_shard=2 zero={zero}" if zero else "pp=2 dp_replicate=2"
    chosen = {"gpt2": dataclasses.replace(cases()["gpt2"], num_steps=1)}
    found = [
        [results["gpt2"].reduced_bytes for results in ranks4.run(train_cases, f"{data} {rest} precision=fp64", chosen)]
        for rest in ("microbatches=2", "microbatches=8", "microbatches=8 schedule=zb_h1")
    ]
    assert found[0] == found[1] == found[2]
    assert min(found[0]) > 0


def test_uneven_stages_match_one_process(references, ranks4):
    compare(ranks4, "pp=4 microbatches=4 split=1+3+3+1", some_cases(), references)
