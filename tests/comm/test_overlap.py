"""Many concurrent collectives on several axes, waited for in any order."""

from __future__ import annotations

import random

import pytest
import torch

from tests.comm.reference import combined, data
from weft.comm.collectives import (
    all_reduce,
    barrier,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from weft.comm.connect import join
from weft.comm.mesh import build_mesh
from weft.comm.transports.shared_memory import NUM_SLOTS, SLOT_BYTES
from weft.config.plan import Plan

SHARED, EXCHANGE, BACKEND = "shared memory", "gloo exchange", "backend"


def out_of_order(plan_text: str, transport: str, axes: list[str], rounds: int, numel: int) -> list:
    """Start all collectives and wait for them in a rank-specific order. Return the names of wrong results."""
    mesh = build_mesh(Plan.parse(plan_text))
    order = random.Random(mesh.rank)
    for name in axes:
        join(mesh[name], "cpu", transport)
    if mesh.world.size > mesh[axes[0]].size:
        join(mesh.world, "cpu", EXCHANGE)
    waiting = []
    for turn in range(rounds):
        for name in axes:
            axis, length = mesh[name], (numel + turn) * 4
            mine = data(axis.rank, length, torch.float32)
            expected = combined(axis.size, length, torch.float32, "sum")
            part = length // axis.size
            own = slice(axis.rank * part, (axis.rank + 1) * part)
            waiting.append((("all_reduce", name, turn), start_all_reduce(mine.clone(), axis), expected))
            waiting.append((("reduce_scatter", name, turn), start_reduce_scatter(mine, axis), expected[own]))
            gathered = torch.cat([data(rank, length, torch.float32) for rank in range(axis.size)])
            waiting.append((("all_gather", name, turn), start_all_gather(mine, axis), gathered))
    order.shuffle(waiting)
    wrong = []
    for turn, (name, pending, expected) in enumerate(waiting):
        # gloo adds four ranks in another order.
        close = transport == BACKEND and torch.allclose(pending.wait(), expected, atol=1e-4)
        if not close and not torch.equal(pending.wait(), expected):
            wrong.append(name)
        if turn == 3:
            # Insert a synchronous call, over gloo if no other axis has all ranks.
            barrier(mesh.world)
    return wrong


@pytest.mark.parametrize("transport", [SHARED, EXCHANGE, BACKEND])
def test_collectives_may_be_waited_for_in_any_order(ranks2, transport):
    # Each takes a third of the slots, so most of it cannot be published when it starts.
    numel = NUM_SLOTS * SLOT_BYTES // 3 // 16
    assert ranks2.run(out_of_order, "dp_replicate=2", transport, ["dp_replicate"], 5, numel) == [[]] * 2


@pytest.mark.parametrize("numel", [100, NUM_SLOTS * SLOT_BYTES // 3 // 16])
@pytest.mark.parametrize("transport", [SHARED, EXCHANGE, BACKEND])
def test_two_axes_run_concurrently(ranks4, transport, numel):
    found = ranks4.run(out_of_order, "dp_replicate=2 dp_shard=2", transport, ["dp_shard", "dp_replicate"], 3, numel)
    assert found == [[]] * 4


@pytest.mark.parametrize("numel", [100, 70001])
@pytest.mark.parametrize("transport", [SHARED, EXCHANGE])
def test_many_concurrent_collectives_on_four_ranks(ranks4, transport, numel):
    assert ranks4.run(out_of_order, "dp_replicate=4", transport, ["dp_replicate"], 6, numel) == [[]] * 4


def crossed_waits(transports: tuple[str, str]) -> list[float]:
    """Wait for two axes in the opposite order to the ranks that this rank depends on."""
    mesh = build_mesh(Plan.parse("dp_replicate=2 dp_shard=2"))
    join(mesh["dp_shard"], "cpu", transports[0])
    join(mesh["dp_replicate"], "cpu", transports[1])
    numel = NUM_SLOTS * SLOT_BYTES  # four times the slots: most is published while waiting
    pending = [
        start_all_reduce(torch.ones(numel), mesh["dp_shard"]),
        start_all_reduce(torch.ones(numel), mesh["dp_replicate"]),
    ]
    if mesh.rank in (1, 2):
        pending.reverse()
    return [float(one.wait().mean()) for one in pending]


@pytest.mark.parametrize("transports", [(SHARED, SHARED), (SHARED, EXCHANGE)])
def test_waiting_on_one_axis_progresses_the_others(ranks4, transports):
    assert ranks4.run(crossed_waits, transports) == [[2.0, 2.0]] * 4


def bits(size: int, transport: str, numel: int) -> tuple[bytes, bytes]:
    mesh = build_mesh(Plan(dp_replicate=size))
    join(mesh.data, "cpu", transport)
    mine = data(mesh.rank, numel, torch.float32)
    part = reduce_scatter(mine, mesh.data)
    return all_reduce(mine, mesh.data).numpy().tobytes(), part.numpy().tobytes()


def test_bits_are_equal_across_ranks_runs_and_transports(ranks4):
    numel = 400_000
    first = ranks4.run(bits, 4, SHARED, numel)
    assert len({full for full, _ in first}) == 1
    assert b"".join(part for _, part in first) == first[0][0]
    assert ranks4.run(bits, 4, SHARED, numel) == first
    assert ranks4.run(bits, 4, EXCHANGE, numel) == first
