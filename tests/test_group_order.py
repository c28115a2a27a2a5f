"""Ranks create process groups in an order without deadlock, checked by simulating every rank of a plan.

Only the members of a group create it, and with gloo each waits there for the others. So it is enough that some group
is next for all its members, until none is left.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.models.registry import build_decoder
from weft.parallel.parallelize import parallelize
from weft.train.step.train_step import TrainStep
from weft.train.tasks.decoder_loss import model_forward, token_cross_entropy
from weft.verify.matrix import covering, legal, row_of

TOKENS, VOCABULARY = 16, 64


def spec_of(plan: Plan, tied: bool, first_moe_layer: int) -> DecoderSpec:
    return DecoderSpec(
        vocab_size=VOCABULARY, dim=16, num_layers=max(4, plan.pp), num_heads=8, num_kv_heads=8, ffn_dim=32,
        max_seq_len=TOKENS, tied=tied, num_experts=8 if plan.ep > 1 else 0, expert_ffn_dim=8,
        first_moe_layer=first_moe_layer if plan.ep > 1 else 0,
    )  # fmt: skip


def groups_made(plan: Plan, rank: int, tied: bool, first_moe_layer: int, monkeypatch) -> list[tuple[int, ...]]:
    """Return the groups that a rank creates from its start to the end of a step, in order."""
    made: list[tuple[int, ...]] = []
    new_group = dist.new_group

    def record(ranks, **options):
        made.append(tuple(ranks))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", record)
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    try:
        mesh = build_mesh(plan)
        model = build_decoder(spec_of(plan, tied, first_moe_layer), device="meta" if plan.pp > 1 else None, seed=0)
        parallelize(model, mesh, seed=0)
        optimizer = torch.optim.AdamW(model.parameters())
        step = TrainStep(model, optimizer, token_cross_entropy, mesh, forward=model_forward, max_grad_norm=1.0)
        # Later stages and distributed experts need data that other ranks send; here no rank sends any.
        if plan.pp == plan.ep == 1:
            rows = torch.arange(TOKENS).repeat(2 * plan.microbatches_per_step, 1)
            step({"input_ids": rows, "labels": (rows + 1) % VOCABULARY, "positions": rows})
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    return made


def blocked_groups(orders: list[list[tuple[int, ...]]]) -> list[tuple[int, ...] | None]:
    """Return the group that each rank waits for at the end, or None if it finished."""
    orders = [list(order) for order in orders]
    moved = True
    while moved:
        moved = False
        for order in orders:
            if order and all(orders[member][:1] == [order[0]] for member in order[0]):
                for member in order[0]:
                    orders[member].pop(0)
                moved = True
    return [order[0] if order else None for order in orders]


def test_crossing_orders_are_found():
    assert blocked_groups([[(0, 1), (0, 2)], [(0, 1)], [(0, 2)]]) == [None, None, None]
    assert blocked_groups([[(0, 1), (0, 2)], [(1, 2), (0, 1)], [(0, 2), (1, 2)]]) == [(0, 1), (1, 2), (0, 2)]


def chosen(num_ranks: int) -> list[str]:
    """Return plans that cover all pairs of values of the axes."""
    plans = legal(
        num_ranks, passes=(1,), microbatches=(1, num_ranks), recompute=("none",), offload=((),), schedule=("1f1b",),
        virtual_stages=(1,), reshard=("after_forward",), cp_mode=("auto",), precision=("fp32",), order=((),),
    )  # fmt: skip
    axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero", "sp")
    pairs = [(one, other) for index, one in enumerate(axes) for other in axes[index + 1 :]]
    return [plans[index].format() for index in covering([row_of(plan) for plan in plans], pairs)]


@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.full)])
def test_no_plan_deadlocks(num_ranks, monkeypatch):
    for text in chosen(num_ranks):
        plan = Plan.parse(text)
        orders = [groups_made(plan, rank, False, 0, monkeypatch) for rank in range(num_ranks)]
        assert blocked_groups(orders) == [None] * num_ranks, (text, orders)


@pytest.mark.parametrize(
    ("text", "tied", "first_moe_layer"),
    [
        ("pp=3", True, 0),
        # The first stage has no layer of experts.
        ("pp=2 dp_shard=4 ep=2 zero=1", False, 2),
        ("pp=2 dp_replicate=2 dp_shard=2 zero=3 microbatches=2", True, 0),
    ],
)
def test_plans_with_different_stages_do_not_deadlock(text, tied, first_moe_layer, monkeypatch):
    plan = Plan.parse(text)
    orders = [groups_made(plan, rank, tied, first_moe_layer, monkeypatch) for rank in range(plan.world_size)]
    assert blocked_groups(orders) == [None] * plan.world_size, orders
    if plan.pp == 3:
        # Only the ends share a weight, and only neighbors send to each other: no group may need all ranks.
        lanes = [[(0, 1)] * 2, [(0, 1)] * 2 + [(1, 2)] * 2, [(1, 2)] * 2]
        assert [[group for group in order if group != (0, 2)] for order in orders] == lanes
        assert [order.count((0, 2)) for order in orders] == [1, 0, 1]
