"""Dropout masks are the same under every plan: results match one process to 1e-10 in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.choice import gate_runs, todays
from tests.parity.adapter_cases import AdapterCase
from tests.parity.dropout_cases import DroppingFamily, FlatFamily, PlainModel, cases, train_throughout
from tests.parity.families import FamilyCase
from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.parallel.dropout.by_position import draws_nothing, drop_by_position
from weft.parallel.parallelize import parallelize
from weft.parallel.random.streams import keeps, key_of, lines_of

RTOL = 1e-10
#: Models that cp does not support: it shards the attention of transformers only.
WITHOUT_CP = frozenset({"plain"})
#: The models on four ranks: learned positions, bidirectional attention, no family.
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
    """Return the cases that differ under a plan, with the difference. names: cases to try, None for all."""
    excluded = WITHOUT_CP if "cp=" in plan else ()
    chosen = {name: case for name, case in cases().items() if name not in excluded and name in (names or cases())}
    if "attention" in plan:
        chosen = {name: case for name, case in chosen.items() if name not in ("gpt2-eager", "gemma2")}
    found = {}
    for result in pool.run(train_throughout, f"{plan} precision=fp64", chosen):
        for name, numbers in result.items():
            if not (difference := numbers.largest_difference(one_process[name])) < RTOL:
                found[name] = difference
    return found


@pytest.mark.parametrize("plan", todays(gate_runs(TWO, 1, 2, 4), parts=3))
def test_dropout_matches_one_process_on_two_ranks(plan, one_process, ranks2):
    assert not differing(plan, one_process, ranks2)


@pytest.mark.parametrize("plan", gate_runs(FOUR, 0))
def test_dropout_matches_one_process_on_four_ranks(plan, one_process, ranks4):
    assert not differing(plan, one_process, ranks4, ON_FOUR)


@pytest.mark.parametrize("plan", gate_runs(["tp=2 sp=on recompute=full", "tp=2 sp=on", "cp=2 cp_mode=ring"], 0))
def test_dropout_of_flattened_tokens_matches_one_process(plan, ranks2):
    opt = FlatFamily("opt", num_steps=2)
    chosen = {"opt": opt, "lora": AdapterCase(opt, dropout=0.3), "dora": AdapterCase(opt, dropout=0.3, kind="dora")}
    want = train_throughout("precision=fp64", chosen)
    for result in ranks2.run(train_throughout, f"{plan} precision=fp64", chosen):
        assert max(numbers.largest_difference(want[name]) for name, numbers in result.items()) < RTOL


def test_dropout_changes_the_loss_and_eager_attention_matches(one_process):
    """Check that losses differ without dropout, and that eager attention has the same mask as torch's function."""
    dry = train_throughout("precision=fp64", {name: FamilyCase(name, num_steps=2) for name in ("gpt2", "bert")})
    for name, numbers in dry.items():
        assert abs(numbers.losses[0] - one_process[name].losses[0]) > 1e-3
    fused, eager = (
        train_throughout("precision=fp64", {"gpt2": DroppingFamily(name, num_steps=2)})["gpt2"]
        for name in ("gpt2-sdpa", "gpt2-eager")
    )
    assert fused.largest_difference(eager) < RTOL


def test_dropout_masks_have_the_rate_and_are_uncorrelated():
    """Check the dropped share, and that samples, tokens, features and names are uncorrelated."""
    positions = [torch.arange(8), torch.arange(256)]
    lines = [lines_of(key_of(1, name), positions)[..., None] for name in ("a", "b")]
    columns = lines_of(key_of("columns"), [torch.arange(512)])
    count = 8 * 256 * 512
    for rate in (0.0, 0.1, 0.5):
        dropped_share = 1.0 - float(keeps(lines[0], columns, rate).double().mean())
        assert abs(dropped_share - rate) < 5 * (rate * (1 - rate) / count) ** 0.5 + 1e-12
    one, other = (keeps(line, columns, 0.5).double() * 2 - 1 for line in lines)
    shifted = [one[1:] * one[:-1], one[:, 1:] * one[:, :-1], one[..., 1:] * one[..., :-1], one * other]
    for product in shifted:
        assert abs(float(product.mean())) < 5 / product.numel() ** 0.5


def forwards_of(model, mesh, num):
    drop_by_position(model, mesh, seed=3)
    x = torch.arange(8)[None].repeat(2, 1)
    return [model(x) for _ in range(num)]


def test_outside_a_train_step_each_forward_has_a_new_mask():
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


def test_module_called_twice_has_a_new_mask_each_time():
    torch.manual_seed(0)
    model = PlainModel(11, 8, 2, 0.5)
    drop_by_position(model, build_mesh(Plan()))
    drop = model.blocks[0].drop
    x = torch.ones(2, 4, 8)
    assert not torch.equal(drop(x), drop(x))
    assert isinstance(drop, nn.Dropout)


def test_hooks_of_the_user_count_as_possible_noise():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    parallelize(model, build_mesh(Plan()))
    assert draws_nothing(model)
    model[1].register_forward_hook(lambda module, args, output: output + torch.randn_like(output))
    assert not draws_nothing(model)
