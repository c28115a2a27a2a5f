"""A contrastive loss over groups of samples: plans whose microbatches have full groups match one process."""

from __future__ import annotations

import pytest

import weft
from tests.parity.group_cases import train_groups
from weft.config.plan import Plan
from weft.errors import ModelError, PlanError
from weft.verify.rank_pool import RankError

RTOL = 1e-10
#: With two microbatches each group is on two ranks.
PLANS = [
    "dp_replicate=2", "dp_replicate=2 accumulation=2", "dp_shard=2 zero=3 accumulation=2",
    "pp=2 microbatches=2", "pp=2 microbatches=2 schedule=zb_h1",
]  # fmt: skip


@pytest.fixture(scope="module")
def one_process():
    return train_groups([""])


def differing(found, one_process):
    differences = {run: result.largest_difference(one_process["", run[1]]) for run, result in found.items()}
    return {run: difference for run, difference in differences.items() if not difference < RTOL}


def test_group_loss_matches_one_process_on_two_ranks(one_process, ranks2):
    for found in ranks2.run(train_groups, PLANS):
        assert not differing(found, one_process)


def test_group_loss_with_stages_matches_one_process_on_four_ranks(one_process, ranks4):
    for found in ranks4.run(train_groups, ["dp_replicate=2 pp=2 microbatches=2", "dp_shard=4 zero=2"]):
        assert not differing(found, one_process)


def test_group_loss_with_microbatches_matches_one_process(one_process):
    assert not differing(train_groups(["accumulation=2"]), one_process)


def test_group_split_over_microbatches_is_rejected(ranks2):
    with pytest.raises(RankError) as caught:
        ranks2.run(train_groups, ["dp_replicate=2 accumulation=4"], (8,))
    assert "group_loss(4): a microbatch holds samples 0 to 1" in caught.value.refusal
    assert "Use a size that divides 2, or fewer microbatches." in caught.value.refusal


def test_group_of_one_sample_and_cp_are_rejected():
    with pytest.raises(ModelError, match=r"group_loss\(1\): a sample is compared with the others"):
        weft.group_loss(1)(lambda own, group, places: (own[0].sum(), 1))
    loss = weft.group_loss(4)(lambda own, group, places: (own[0].sum(), 1))
    mesh = type("Cut", (), {"plan": Plan.parse("cp=2")})()
    with pytest.raises(PlanError, match="cp=2: the loss compares features of full samples"):
        loss.over(mesh)
