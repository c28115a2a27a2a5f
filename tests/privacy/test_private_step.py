"""Private steps under plans against a plain loop over single samples, in float64."""

from __future__ import annotations

import functools

import pytest
import torch

import weft
from tests.privacy.private_cases import LIMIT, PrivateCase, difference, loss_fn, make, plain, records, script, train
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.errors import CheckpointError


@functools.cache
def wanted(model: str, noise: float, steps: int, batch: int) -> dict:
    return plain(PrivateCase(model, noise=noise, steps=steps, batch=batch))


def assert_same(found, case: PrivateCase) -> None:
    want = wanted(case.model, case.noise, case.steps, case.batch)
    assert difference(found, want) <= LIMIT, case


@pytest.mark.parametrize("model", ["net", "decoder", "tied", "gpt2", "experts", "lora"])
@pytest.mark.parametrize("passes", [1, 2])
def test_one_rank(model, passes):
    for noise in (0.0, 0.7):
        case = PrivateCase(model, "accumulation=2" if passes == 2 else "", noise=noise, passes=passes)
        assert_same(train(case), case)


@pytest.mark.parametrize("model", ["net", "tied", "experts", "lora"])
@pytest.mark.parametrize("passes", [1, 2])
def test_units_of_several_records(model, passes):
    """The gradient of a user is the mean over its records, which is clipped once."""
    options = {"batch": 3, "by_user": True, "most": 4 if passes == 2 else 0}
    case = PrivateCase(model, "accumulation=2" if passes == 2 else "", passes=passes, **options)
    assert difference(train(case), plain(case)) <= LIMIT


USERS = {"batch": 3, "by_user": True, "steps": 3}


@pytest.mark.parametrize("plan", ["dp_shard=2 zero=2 accumulation=2", "pp=2 microbatches=2"])
def test_units_of_two_ranks(plan, ranks2):
    case = PrivateCase("gpt2", plan, **USERS)
    for found in ranks2.run(train, case):
        assert difference(found, plain(case)) <= LIMIT


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=3", "tp=2", "tp=2 sp=on", "dp_replicate=2", "pp=2 microbatches=3"])
def test_units_of_two_ranks_and_other_plans(plan, ranks2):
    case = PrivateCase("gpt2", plan, **USERS)
    for found in ranks2.run(train, case):
        assert difference(found, plain(case)) <= LIMIT


def test_ten_steps_with_empty_draws():
    case = PrivateCase("net", steps=10, batch=1)
    assert_same(train(case), case)


TWO = [
    "dp_replicate=2 accumulation=2", "dp_shard=2 zero=1", "dp_shard=2 zero=2 accumulation=2", "dp_shard=2 zero=3",
    "dp_shard=2 zero=3 accumulation=2", "tp=2", "tp=2 sp=on", "tp=2 accumulation=2", "pp=2 microbatches=2",
    "pp=2 microbatches=2 schedule=zb_h1",
]  # fmt: skip
FOUR = [
    "dp_replicate=2 tp=2", "dp_shard=2 tp=2 zero=1", "dp_shard=2 tp=2 zero=2", "dp_shard=2 tp=2 zero=3",
    "pp=2 tp=2 microbatches=2", "pp=2 dp_shard=2 zero=1 microbatches=2", "pp=2 dp_shard=2 zero=3 microbatches=2",
    "dp_shard=2 dp_replicate=2 zero=2 accumulation=2",
]  # fmt: skip
#: Plans that refuse a model, by its name.
REFUSED = {"experts": "tp=", "tied": "pp="}


def cases(models: list[str], plans: list[str]) -> list[PrivateCase]:
    return [PrivateCase(model, plan) for model in models for plan in plans if REFUSED.get(model, "!") not in plan]


@pytest.mark.parametrize("case", cases(["decoder"], TWO), ids=str)
def test_two_ranks(case, ranks2):
    for found in ranks2.run(train, case):
        assert_same(found, case)


@pytest.mark.full
@pytest.mark.parametrize("case", cases(["gpt2", "lora", "experts", "tied", "net"], TWO), ids=str)
def test_two_ranks_and_other_models(case, ranks2):
    if case.model == "net" and ("tp=" in case.plan or "pp=" in case.plan):
        pytest.skip("a model without repeated blocks or a layout")
    for found in ranks2.run(train, case):
        assert_same(found, case)


@pytest.mark.parametrize("case", cases(["gpt2"], FOUR[3:5]), ids=str)
def test_four_ranks(case, ranks4):
    for found in ranks4.run(train, case):
        assert_same(found, case)


@pytest.mark.full
@pytest.mark.parametrize("case", cases(["decoder", "lora", "experts", "tied"], FOUR), ids=str)
def test_four_ranks_and_other_models(case, ranks4):
    for found in ranks4.run(train, case):
        assert_same(found, case)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["dp_shard=2 zero=2 accumulation=2", "tp=2", "pp=2 microbatches=2"])
def test_ten_steps_of_two_ranks(plan, ranks2):
    for noise in (0.0, 0.7):
        case = PrivateCase("gpt2", plan, noise=noise, steps=10, batch=3)
        for found in ranks2.run(train, case):
            assert_same(found, case)


@pytest.mark.parametrize("plan", ["dp_shard=2 zero=1", "pp=2 microbatches=2"])
def test_empty_draws_of_two_ranks(plan, ranks2):
    case = PrivateCase("gpt2", plan, steps=4, batch=1)
    for found in ranks2.run(train, case):
        assert_same(found, case)


def weights_of(run, model):
    return {name: tensor.clone() for name, tensor in run.full_state_dict(model).items()}


def test_saved_account_continues(tmp_path):
    case = PrivateCase("net", steps=4)
    run, model, step = script(case)
    batches = run.private_batches(records(), step)
    for _ in range(2):
        step(next(batches))
    run.save(str(tmp_path), step=2, model=model, optimizer=step)
    other, again, resumed = script(case)
    other.load(str(tmp_path), model=again, optimizer=resumed)
    assert resumed.privacy.ledger.count == 2
    for batch in other.private_batches(records(), resumed):
        resumed(batch)
    assert difference(weights_of(other, again), wanted("net", 0.7, 4, 6)) <= LIMIT
    plain_run = weft.Run(run.plan, build_mesh(run.plan), Ledger(), seed=0)
    public = plain_run.parallelize(make("net"))
    plain_step = plain_run.train_step(public, torch.optim.AdamW, loss_fn, lr=1e-2)
    with pytest.raises(CheckpointError, match="the checkpoint's steps were private, and a further step"):
        plain_run.load(str(tmp_path), model=public, optimizer=plain_step)
