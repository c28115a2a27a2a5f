"""Samples with different numbers of rows: plans match one process on full batches."""

from __future__ import annotations

import pytest

from tests.choice import gate_runs, todays
from tests.parity.ragged_cases import train_all, train_decoder, train_decoders

RTOL = 1e-10
#: Batches of 5, 5 and 1 do not divide evenly, and the last leaves ranks and microbatches without a sample.
SETTINGS = {"plain": {"rate": 0.0}, "dropout": {}}
TWO = [
    "dp_replicate=2",
    "dp_replicate=2 accumulation=3",
    "dp_shard=2 zero=2 accumulation=2",
    "dp_shard=2 zero=3 recompute=full",
    "tp=2 accumulation=3",
    "pp=2 microbatches=3",
    "pp=2 microbatches=2 schedule=zb_h1 recompute=full",
]
FOUR = ["dp_replicate=2 pp=2 microbatches=2", "dp_shard=2 zero=3 tp=2 accumulation=2"]


@pytest.fixture(scope="module")
def one_process():
    return {name: found for (_, name), found in train_all(["accumulation=1"], SETTINGS).items()}


def differing(found, one_process):
    differences = {}
    for (plan, name), (result, evaluated) in found.items():
        expected, expected_evaluated = one_process[name]
        difference = max(result.largest_difference(expected), abs(evaluated / expected_evaluated - 1))
        if not difference < RTOL:
            differences[plan, name] = difference
    return differences


def test_ragged_microbatches_match_full_batches(one_process):
    assert not differing(train_all(["accumulation=3"], SETTINGS), one_process)
    assert one_process["plain"][0].losses != one_process["dropout"][0].losses


@pytest.mark.parametrize("plan", todays(gate_runs(TWO, 1, 3, 4, 6), parts=2))
def test_ragged_batches_match_one_process_on_two_ranks(plan, one_process, ranks2):
    for found in ranks2.run(train_all, [plan], SETTINGS):
        assert not differing(found, one_process)


@pytest.mark.parametrize("plan", gate_runs(FOUR, 1))
def test_ragged_batches_match_one_process_on_four_ranks(plan, one_process, ranks4):
    for found in ranks4.run(train_all, [plan], {"dropout": {}}):
        assert not differing(found, one_process)


def test_short_batches_with_experts_and_sharded_sequences(ranks2):
    """Check that a placeholder microbatch contributes neither to the balancing loss nor to token counts."""
    reference = train_decoder("accumulation=1")
    plans = ["dp_shard=2 ep=2 accumulation=2", "dp_replicate=2 recompute=full", "cp=2 cp_mode=ring accumulation=2"]
    for found in ranks2.run(train_decoders, plans):
        different = {plan: one.largest_difference(reference) for plan, one in found.items()}
        assert not {plan: value for plan, value in different.items() if not value < RTOL}
