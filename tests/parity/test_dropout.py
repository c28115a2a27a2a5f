"""Dropout is the same under every plan: what one process drops is what all ranks together drop, to 1e-10 in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.choice import gate_runs
from tests.parity.adapter_cases import AdapterCase
from tests.parity.dropout_cases import DroppingFamily, FlatFamily, PlainModel, cases, train_throughout
from tests.parity.families import FamilyCase
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.dropout.by_position import drop_by_position
from weft.parallel.random.streams import keeps, key_of, lines_of

RTOL = 1e-10
#: The models that a plan cannot be laid over: cut sequences know the attention of transformers alone.
WITHOUT_CP = frozenset({"plain"})
#: The models of four ranks: learned positions, attention both ways, no family.
ON_FOUR = frozenset({"gpt2", "bert", "plain"})
TWO = [
    "dp_replicate=2 accumulation=2",
    "dp_shard=2 zero=3 recompute=full",
    "tp=2 sp=on recompute=selective",
    "tp=2 recompute=attention",
    "cp=2 cp_mode=ring recompute=full",
    "pp=2 microbatches=2 recompute=full",
]
FOUR = ["tp=2 sp=on cp=2 cp_mode=ring", "dp_shard=2 zero=2 tp=2 recompute=full"]


@pytest.fixture(scope="module")
def one_process():
    return train_throughout("precision=fp64", cases())


def differing(plan, one_process, pool, names=None):
    """Cases that differ under a plan, with the difference. names: of the cases to try; None: all."""
    left_out = WITHOUT_CP if "cp=" in plan else ()
    chosen = {name: case for name, case in cases().items() if name not in left_out and name in (names or cases())}
    if "attention" in plan:
        chosen = {name: case for name, case in chosen.items() if name not in ("gpt2-eager", "gemma2")}
    found = {}
    for result in pool.run(train_throughout, f"{plan} precision=fp64", chosen):
        for name, numbers in result.items():
            if not (difference := numbers.largest_difference(one_process[name])) < RTOL:
                found[name] = difference
    return found


@pytest.mark.parametrize("plan", gate_runs(TWO, 1, 2, 4))
def test_two_ranks(plan, one_process, ranks2):
    assert not differing(plan, one_process, ranks2)


@pytest.mark.parametrize("plan", gate_runs(FOUR, 0))
def test_four_ranks(plan, one_process, ranks4):
    assert not differing(plan, one_process, ranks4, ON_FOUR)


@pytest.mark.parametrize("plan", gate_runs(["tp=2 sp=on recompute=full", "tp=2 sp=on", "cp=2 cp_mode=ring"], 0))
def test_tokens_that_a_model_flattens(plan, ranks2):
    opt = FlatFamily("opt", num_steps=2)
    chosen = {"opt": opt, "lora": AdapterCase(opt, dropout=0.3), "dora": AdapterCase(opt, dropout=0.3, kind="dora")}
    want = train_throughout("precision=fp64", chosen)
    for result in ranks2.run(train_throughout, f"{plan} precision=fp64", chosen):
        assert max(numbers.largest_difference(want[name]) for name, numbers in result.items()) < RTOL


def test_dropout_drops(one_process):
    """Without it the losses are others; eager attention drops the same weights as torch's function."""
    dry = train_throughout("precision=fp64", {name: FamilyCase(name, num_steps=2) for name in ("gpt2", "bert")})
    for name, numbers in dry.items():
        assert abs(numbers.losses[0] - one_process[name].losses[0]) > 1e-3
    fused, eager = (
        train_throughout("precision=fp64", {"gpt2": DroppingFamily(name, num_steps=2)})["gpt2"]
        for name in ("gpt2-sdpa", "gpt2-eager")
    )
    assert fused.largest_difference(eager) < RTOL


def test_numbers_are_random():
    """The share that goes is the rate, and neither samples, tokens, features, keys nor names go together."""
    places = [torch.arange(8), torch.arange(256)]
    lines = [lines_of(key_of(1, name), places)[..., None] for name in ("a", "b")]
    columns = lines_of(key_of("columns"), [torch.arange(512)])
    count = 8 * 256 * 512
    for rate in (0.0, 0.1, 0.5):
        share = 1.0 - float(keeps(lines[0], columns, rate).double().mean())
        assert abs(share - rate) < 5 * (rate * (1 - rate) / count) ** 0.5 + 1e-12
    one, other = (keeps(line, columns, 0.5).double() * 2 - 1 for line in lines)
    shifted = [one[1:] * one[:-1], one[:, 1:] * one[:, :-1], one[..., 1:] * one[..., :-1], one * other]
    for product in shifted:
        assert abs(float(product.mean())) < 5 / product.numel() ** 0.5


def forwards_of(model, mesh, num):
    drop_by_position(model, mesh, seed=3)
    x = torch.arange(8)[None].repeat(2, 1)
    return [model(x) for _ in range(num)]


def test_outside_of_our_steps_each_forward_has_its_own_numbers():
    torch.manual_seed(0)
    mesh = build_mesh(Plan())
    model = PlainModel(11, 8, 2, 0.5)
    torch.manual_seed(0)
    same = PlainModel(11, 8, 2, 0.5)
    first, second = forwards_of(model, mesh, 2)
    again, _ = forwards_of(same, mesh, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(torch.arange(8)[None]), model(torch.arange(8)[None]))


def test_a_module_that_is_called_twice_drops_differently_each_time():
    torch.manual_seed(0)
    model = PlainModel(11, 8, 2, 0.5)
    drop_by_position(model, build_mesh(Plan()))
    drop = model.blocks[0].drop
    x = torch.ones(2, 4, 8)
    assert not torch.equal(drop(x), drop(x))
    assert isinstance(drop, nn.Dropout)
