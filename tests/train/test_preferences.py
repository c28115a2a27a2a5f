"""Preference training: the papers' formulas in plain lines, and the same losses under every plan."""

from __future__ import annotations

import pytest

from tests.train.preference_cases import CASES, OBJECTIVES, losses_under, plain_losses, write_pairs

#: What the gate tries of the plans of two ranks, with which cases.
GATE = {
    "dp_shard=2 zero=3 accumulation=2": ("dpo", "kto", "simpo"),
    "tp=2": ("dpo", "kto-off", "orpo"),
}
PLANS = ["dp_replicate=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2 accumulation=2", "dp_shard=2 zero=3", "tp=2 sp=on",
         "cp=2", "pp=2 microbatches=2"]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    return write_pairs(folder), folder / "cache", folder / "runs"


@pytest.fixture(scope="module")
def one_process(place):
    return losses_under("dp_replicate=1", tuple(CASES), *place)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_the_formula(name, place, one_process):
    wanted = plain_losses(name, *place)
    for (loss, norm, count), (plain, plain_norm) in zip(one_process[name], wanted, strict=True):
        assert loss == pytest.approx(plain, rel=1e-9)
        assert norm == pytest.approx(plain_norm, rel=1e-7)
        assert count == 4


def compared(ranks, plan, names, place, one_process):
    for result in ranks.run(losses_under, plan, names, *place):
        for name in names:
            for (loss, norm, count), (wanted, wanted_norm, wanted_count) in zip(
                result[name], one_process[name], strict=True
            ):
                assert loss == pytest.approx(wanted, rel=1e-9), name
                assert norm == pytest.approx(wanted_norm, rel=1e-6), name
                assert count == wanted_count


@pytest.mark.parametrize("plan", GATE)
def test_two_ranks_lose_what_one_does(plan, place, one_process, ranks2):
    compared(ranks2, plan, GATE[plan], place, one_process)


@pytest.mark.full
@pytest.mark.parametrize("plan", [*PLANS, *GATE])
def test_two_ranks_lose_what_one_does_under_every_plan(plan, place, one_process, ranks2):
    compared(ranks2, plan, tuple(CASES), place, one_process)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3 tp=2", "tp=2 pp=2 microbatches=2", "dp_shard=2 zero=2 cp=2"])
def test_four_ranks_lose_what_one_does(plan, place, one_process, ranks4):
    compared(ranks4, plan, OBJECTIVES, place, one_process)
