"""Two-level collectives are bitwise equal to one sum over all ranks and send the expected bytes.

One machine simulates several hosts.
"""

from __future__ import annotations

import pytest
import torch

from tests.comm.reference import data
from tests.comm.test_collectives import same_bits, wrong_values
from weft.comm.collectives import all_reduce, barrier, start_all_gather, start_all_reduce, start_reduce_scatter
from weft.comm.connect import transports
from weft.comm.ledger import Ledger
from weft.comm.mesh import build_mesh
from weft.comm.transports.scattered_tensor import Parts
from weft.comm.transports.two_level import Hosts
from weft.config.plan import Plan
from weft.errors import CommError
from weft.verify.rank_pool import RankPool

TWO_LEVELS, EXCHANGE = "two levels", "gloo exchange"
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
#: The last two are odd and larger than the limit of the flat route for every dtype.
NUMELS = [5, 12289, 40001]


def on_hosts(block: int, function, *args):
    """Return the result of `function` with each `block` of neighboring ranks on its own simulated host."""
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_HOST", f"host{dist.get_rank() // block}")
        return function(*args)


@pytest.fixture(scope="module")
def ranks12():
    with RankPool(12) as pool:
        yield pool


@pytest.fixture(scope="module")
def ranks8():
    with RankPool(8) as pool:
        yield pool


def chosen_transports(size: int, route: str = "auto") -> list[tuple[str, str]]:
    axis = (mesh := build_mesh(Plan(dp_replicate=size), route=route)).data
    barrier(axis)
    return [(one.transport, one.reason) for one in transports(mesh)]


def bits(size: int, numels: list[int], dtypes: tuple, ops: tuple) -> list:
    return wrong_values(size, TWO_LEVELS, numels, dtypes, ops)


def test_two_hosts_of_two_ranks_match_one_process_bitwise(ranks4):
    for wrong in ranks4.run(on_hosts, 2, bits, 4, NUMELS, (), ("sum", "max", "min")):
        assert wrong == []
    assert (
        ranks4.run(on_hosts, 2, chosen_transports, 4) == [[(TWO_LEVELS, "2 hosts hold 2 neighboring ranks each")]] * 4
    )
    assert {one[0][0] for one in ranks4.run(on_hosts, 2, chosen_transports, 4, "flat")} == {EXCHANGE}


@pytest.mark.full
@pytest.mark.parametrize("size, block", [(8, 4), (8, 2), (12, 4)])
def test_more_hosts_and_ranks_match_one_process_bitwise(size, block, request):
    pool = request.getfixturevalue(f"ranks{size}")
    for wrong in pool.run(on_hosts, block, bits, size, NUMELS[1:], FLOATS, ("sum",)):
        assert wrong == []


def parts_and_order(backwards: bool) -> tuple[list[torch.Tensor], list]:
    """Run several concurrent collectives, some with parts, waiting in another order on some ranks.

    Return the results and the bytes that were sent.
    """
    ledger = Ledger()
    mesh = build_mesh(Plan(dp_replicate=4), record=ledger.record)
    axis = mesh.data
    mine = [data(mesh.rank + 10 * turn, 40000, torch.float32) for turn in range(3)]
    parts = Parts([(0, mine[0][:10000]), (20000, mine[0][10000:30000])], 40000)
    pending = [
        start_all_reduce(mine[1], axis),
        start_all_gather(mine[2][:10000], axis),
        start_reduce_scatter(parts, axis, torch.zeros(10000)),
        start_all_reduce(torch.empty(40000), axis, parts=parts),
        start_all_reduce(torch.ones(3), axis),
    ]
    for one in reversed(pending) if backwards and mesh.rank in (1, 2) else pending:
        one.wait()
    rows = {kind: (entry.sent_bytes, entry.off_host_bytes) for _, kind, entry in ledger.rows()}
    return [one.wait().clone() for one in pending], rows


def test_waits_in_any_order_match_and_off_host_bytes_are_exact(ranks4):
    flat = ranks4.run(parts_and_order, False)
    for backwards in (False, True):
        found = ranks4.run(on_hosts, 2, parts_and_order, backwards)
        for one, other in zip(found, flat, strict=True):
            assert all(map(same_bits, one[0], other[0]))
    assert all(off_host == 0 for one in flat for _, off_host in one[1].values())
    size_bytes = 160000
    for kind, number, share in (("all_reduce", 2, 1.0), ("all_gather", 1, 0.5), ("reduce_scatter", 1, 0.5)):
        # A host's two ranks send 2 (H - 1) / H of an all_reduce. The three-element tensor goes to all ranks by gloo's
        # broadcasts: ten edges of their four trees cross hosts.
        left = sum(one[1][kind][1] for one in found[:2])
        assert left == number * share * size_bytes + (10 / 2 * 12 if kind == "all_reduce" else 0), kind


def crossed_waits() -> float:
    """On half of the ranks, wait for a two-level sum before starting the sum that the others wait for first."""
    axis = build_mesh(Plan(dp_replicate=4)).data
    sums = 0.0
    for _ in range(5):
        large = start_all_reduce(torch.ones(40000), axis)
        if axis.rank in (1, 2):
            large.wait()
        small = start_all_reduce(torch.ones(3), axis)
        sums += float(small.wait()[0] + large.wait()[0])
    return sums


def test_wait_for_small_sum_progresses_two_level_sums(ranks4):
    assert ranks4.run(on_hosts, 2, crossed_waits) == [40.0] * 4


def sent_by_exchange() -> int:
    ledger = Ledger()
    axis = build_mesh(Plan(dp_replicate=4), record=ledger.record, route="flat").data
    all_reduce(torch.ones(40000), axis)
    return ledger.off_host_bytes()


def test_flat_route_sends_two_and_a_quarter_times_the_bytes(ranks4):
    found = ranks4.run(on_hosts, 2, sent_by_exchange)
    assert sum(found) == 2 * 2.25 * 160000


def refused() -> str:
    with pytest.raises(CommError) as error:
        all_reduce(torch.ones(3), build_mesh(Plan(dp_replicate=4), route="two_level").data)
    return str(error.value)


def test_two_level_route_is_rejected_for_unequal_hosts(ranks4):
    assert set(ranks4.run(on_hosts, 3, refused)) == {
        "route=two_level: axis dp_replicate: its hosts do not have equal blocks of 2, 4, 8 ... neighboring ranks "
        "that share memory. Use route=auto, or put 2, 4, 8 ... neighbors of the axis on each host."
    }
    assert {one[0][0] for one in ranks4.run(on_hosts, 3, chosen_transports, 4)} == {EXCHANGE}


@pytest.mark.parametrize(
    "memories, block",
    [
        ((0, 0, 1, 1), 2),
        ((0, 0, 0, 0), 1),
        ((0, 1, 0, 1), 1),
        ((0, 0, 0, 1, 1, 1), 1),
        ((0, 0, 1, 1, 2, 2), 2),
        ((0, 0, 0, 0, 1, 1), 1),
        ((0, 0, -1, -1), 1),
        ((0, 1, 2, 3), 1),
    ],
)
def test_host_blocks_are_equal_powers_of_two_or_one(memories, block):
    assert Hosts(memories, memories, "").block == block
