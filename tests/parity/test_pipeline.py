"""Every schedule of a pipeline computes what one process computes: loss, norm, gradients, weights."""

from __future__ import annotations

import pytest

from tests.parity.pipeline_cases import cases, families, train_cases

RTOL = 1e-10

ONE_STAGE = ["gpipe", "1f1b", "zb_h1"]
TWO_STAGES = ["interleaved", "zb_interleaved", "zb_v", "dualpipe_v"]
SCHEDULES = [f"schedule={name}" for name in ONE_STAGE] + [f"schedule={name} virtual_stages=2" for name in TWO_STAGES]


@pytest.fixture(scope="module")
def references():
    return train_cases("precision=fp64", cases())


@pytest.fixture(scope="module")
def family_references():
    return train_cases("precision=fp64", families())


def compare(ranks, plan, chosen, references):
    for results in ranks.run(train_cases, f"{plan} precision=fp64", chosen):
        for name, result in results.items():
            assert result.largest_difference(references[name]) < RTOL, name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks(schedule, references, ranks2):
    compare(ranks2, f"pp=2 microbatches=4 {schedule}", cases(), references)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_ranks(schedule, references, ranks4):
    compare(ranks4, f"pp=4 microbatches=8 {schedule}", cases(), references)


@pytest.mark.parametrize(
    "data", ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2", "dp_shard=2 zero=1 recompute=full"]
)
@pytest.mark.parametrize("schedule", ["schedule=1f1b", "schedule=zb_h1", "schedule=zb_v virtual_stages=2"])
def test_with_data_parallel(schedule, data, references, ranks4):
    chosen = {name: case for name, case in cases().items() if name != "sequential" or "recompute" not in data}
    compare(ranks4, f"pp=2 microbatches=4 {data} {schedule}", chosen, references)


@pytest.mark.parametrize("schedule", ["schedule=1f1b", "schedule=zb_v virtual_stages=2"])
def test_hugging_face_families(schedule, family_references, ranks2):
    compare(ranks2, f"pp=2 microbatches=4 {schedule}", families(), family_references)


def test_uneven_stages(references, ranks4):
    chosen = {name: case for name, case in cases().items() if name != "sequential"}
    compare(ranks4, "pp=4 microbatches=4 split=1+3+3+1", chosen, references)
