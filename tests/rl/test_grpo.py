"""The policy loss of recorded completions: formulas as a reference, equal under every plan, and planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rl.cases import CASES, EXPERTS, plain_results, results_under

#: Plans of two ranks that the gate runs, with their cases.
GATE = {
    "dp_shard=2 zero=3 accumulation=2": ("grpo", "updates"),
    "tp=2": ("tokens", "adapter"),
}
PLANS = ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2 accumulation=2", "dp_shard=2 zero=3", "tp=2 sp=on",
         "cp=2", "pp=2 microbatches=2", "dp_replicate=2 accumulation=4"]  # fmt: skip
#: Faults, and a case that shows each.
FAULTS = {"length bias": "tokens", "mask shifted": "dr_grpo", "stale log probabilities": "updates", "KL sign": "grpo"}


@pytest.fixture(scope="module")
def wanted():
    return {name: plain_results(name) for name in CASES}


def compare(found, wanted):
    for (loss, norm, count), (plain, plain_norm, plain_count) in zip(found["steps"], wanted["steps"], strict=True):
        assert loss == pytest.approx(plain, rel=1e-10, abs=1e-10)
        assert norm == pytest.approx(plain_norm, rel=1e-10)
        assert count == plain_count
    for name, weights in wanted["weights"].items():
        assert np.abs(found["weights"][name] - weights).max() < 1e-10, name


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_match_the_formula(name, tmp_path, wanted):
    compare(results_under("dp_replicate=1", (name,), tmp_path)[name], wanted[name])


def compare_all(ranks, plan, names, tmp_path, wanted):
    one = results_under("dp_replicate=1", names, tmp_path)
    for number, result in enumerate(ranks.run(results_under, plan, names, tmp_path)):
        for name in names:
            compare(result[name], wanted[name])
            for metrics, expected in zip(result[name]["metrics"], one[name]["metrics"], strict=True):
                assert metrics == pytest.approx(expected, rel=1e-9, abs=1e-12), (number, name)


@pytest.mark.parametrize("plan", GATE)
def test_two_ranks_match_the_formula(plan, tmp_path, wanted, ranks2):
    compare_all(ranks2, plan, GATE[plan], tmp_path, wanted)


@pytest.mark.full
@pytest.mark.parametrize("plan", [*PLANS, *GATE])
def test_two_ranks_match_the_formula_under_every_plan(plan, tmp_path, wanted, ranks2):
    compare_all(ranks2, plan, tuple(CASES), tmp_path, wanted)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3 tp=2", "tp=2 pp=2 microbatches=2", "dp_shard=2 zero=2 cp=2"])
def test_four_ranks_match_the_formula(plan, tmp_path, wanted, ranks4):
    compare_all(ranks4, plan, ("grpo", "updates", "distill"), tmp_path, wanted)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 ep=2", "dp_shard=2 ep=2 zero=3 accumulation=2"])
def test_experts_match_the_formula(plan, tmp_path, ranks2):
    names = ("grpo", "updates")
    for result in ranks2.run(results_under, plan, names, tmp_path, EXPERTS):
        for name in names:
            compare(result[name], plain_results(name, EXPERTS))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, tmp_path, wanted):
    name = FAULTS[fault]
    with pytest.raises(AssertionError):
        compare(results_under("dp_replicate=1", (name,), tmp_path, fault=fault)[name], wanted[name])


def test_statistics_per_rank_are_found(tmp_path, wanted, ranks2):
    plan = "dp_replicate=2 accumulation=2"
    for result in ranks2.run(results_under, plan, ("dr_grpo",), tmp_path, fault="statistics per rank"):
        with pytest.raises(AssertionError):
            compare(result["dr_grpo"], wanted["dr_grpo"])
