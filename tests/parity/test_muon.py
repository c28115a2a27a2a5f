"""Muon with sharded, offloaded and tensor-parallel matrices matches Muon in one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.choice import gate_runs
from tests.parity.cases import LLAMA
from tests.parity.plans import train_quietly
from weft.optim.muon import Muon
from weft.verify.parity import DecoderCase, train_plain

RTOL = 1e-10


@dataclass(frozen=True)
class MuonCase(DecoderCase):
    """A decoder whose matrices, including embedding and head, are all trained by Muon."""

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return Muon(model.parameters(), lr=3e-3)


TIED = MuonCase(LLAMA, num_steps=3)
UNTIED = MuonCase(dataclasses.replace(LLAMA, tied=False), num_steps=3)

PLANS_2 = [
    "dp_replicate=2",
    "dp_shard=2 zero=1",
    "dp_shard=2 zero=2 accumulation=2 offload=optimizer",
    "dp_shard=2 zero=3",
    "dp_shard=2 zero=3 reshard=after_step accumulation=2",
    "dp_shard=2 zero=3 offload=optimizer",
    "dp_shard=2 zero=3 accumulation=2 offload=optimizer:0.5",
    "tp=2",
    "tp=2 sp=on accumulation=2",
    "tp=2 offload=optimizer:0.5",
    "pp=2 microbatches=2",
]
PLANS_4 = [
    "dp_replicate=2 dp_shard=2 zero=2",
    "dp_replicate=2 dp_shard=2 zero=3",
    "dp_shard=2 tp=2 zero=1",
    "dp_shard=2 tp=2 sp=on zero=2",
    "dp_shard=2 tp=2 zero=3",
    "dp_shard=2 tp=2 zero=3 accumulation=2 offload=optimizer",
    "tp=4",  # two ranks hold the same key-value heads
]


def train_plans(plans: list[str], case: MuonCase):
    return {plan: train_quietly(f"{plan} precision=fp64", {"muon": case})["muon"] for plan in plans}


@pytest.mark.parametrize("ranks, plans, case", gate_runs([("ranks2", PLANS_2, UNTIED), ("ranks4", PLANS_4, TIED)], 0))
def test_muon_on_shards_matches_muon_on_full_matrices(ranks, plans, case, request):
    expected = train_plain(case)
    for found in request.getfixturevalue(ranks).run(train_plans, plans, case):
        for plan, result in found.items():
            assert result.largest_difference(expected) < RTOL, plan
