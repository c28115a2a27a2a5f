"""The mesh: which ranks share an axis, as pure arithmetic and on real groups."""

from __future__ import annotations

import datetime
import itertools

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from weft import env
from weft.comm.collectives import all_reduce
from weft.comm.mesh import Mesh, build_mesh, join_group, join_ranks, leave_ranks, loopback_store
from weft.comm.rank_positions import members_of
from weft.config.plan import AXES, Plan
from weft.errors import CommError, PlanError
from weft.verify.rank_pool import RankPool

sizes = st.tuples(*[st.integers(1, 3)] * len(AXES))


@given(sizes, st.data())
@settings(max_examples=60, deadline=None)
def test_members_differ_only_on_these_axes(axis_sizes, data):
    plan = Plan(**dict(zip(AXES, axis_sizes, strict=True)))
    names = tuple(sorted(data.draw(st.sets(st.sampled_from(AXES), min_size=1)), key=AXES.index))
    coordinates = list(itertools.product(*[range(size) for size in axis_sizes]))  # row-major: rank = index
    rank = data.draw(st.integers(0, plan.world_size - 1))
    fixed = [index for index, name in enumerate(AXES) if name not in names]
    expected = tuple(
        other for other, place in enumerate(coordinates) if all(place[i] == coordinates[rank][i] for i in fixed)
    )
    assert members_of(plan, rank, names) == expected


@given(sizes, st.permutations(AXES), st.data())
@settings(max_examples=60, deadline=None)
def test_axis_order_makes_its_first_axis_the_innermost(axis_sizes, order, data):
    in_use = [name for name, size in zip(AXES, axis_sizes, strict=True) if size > 1]
    plan = Plan(**dict(zip(AXES, axis_sizes, strict=True)), order=tuple(name for name in order if name in in_use))
    places = list(itertools.product(*[range(size) for size in plan.axis_sizes().values()]))  # row-major: rank = index
    assert [name for name in plan.axis_order if name in in_use] == list(plan.order)
    names = data.draw(st.sets(st.sampled_from(AXES), min_size=1))
    rank = data.draw(st.integers(0, plan.world_size - 1))
    fixed = [index for index, name in enumerate(plan.axis_order) if name not in names]
    mesh = Mesh.__new__(Mesh)
    mesh.plan, mesh.rank = plan, rank
    found = mesh.ranks_over(tuple(names))
    assert found == tuple(
        other for other, place in enumerate(places) if all(place[i] == places[rank][i] for i in fixed)
    )
    assert list(found) == sorted(found)  # as torch orders the ranks of a group


def test_axes_of_one_process_exist_with_size_one():
    mesh = build_mesh(Plan())
    for name in AXES:
        assert (mesh[name].size, mesh[name].rank, mesh[name].group) == (1, 0, None)
    assert mesh.world.size == 1


def test_unknown_axis_is_refused_by_name():
    with pytest.raises(PlanError, match=r"mesh axis 'dp'.*dp_replicate"):
        build_mesh(Plan())["dp"]


def test_mesh_for_more_ranks_than_started_is_refused():
    with pytest.raises(PlanError) as caught:
        build_mesh(Plan(dp_shard=4, tp=2))
    assert str(caught.value) == (
        "plan=dp_shard=4 tp=2: it needs 8 ranks (dp_shard=4 * tp=2), but 1 were started. Start 8 ranks, or use '*' "
        "for one axis, such as dp_replicate=*."
    )


def sum_along_axes(plan_text: str) -> dict[str, float]:
    """On each rank: return the sum of 2**rank over each axis and the joined data axis."""
    from weft.comm.collectives import all_reduce
    from weft.comm.ledger import Ledger

    ledger = Ledger()
    mesh = build_mesh(Plan.parse(plan_text), record=ledger.record)
    found = {}
    for name in ("dp_replicate", "tp", ("dp_replicate", "tp"), "cp"):
        axis = mesh[name]
        found[axis.name] = float(all_reduce(torch.tensor(2.0**mesh.rank), axis))
    found["calls"] = sum(entry.calls for _, _, entry in ledger.rows())
    return found


def test_each_axis_has_its_own_group_of_real_ranks(ranks4):
    found = ranks4.run(sum_along_axes, "dp_replicate=2 tp=2")
    # rank = dp_replicate * 2 + tp
    assert [row["tp"] for row in found] == [3, 3, 12, 12]
    assert [row["dp_replicate"] for row in found] == [5, 10, 5, 10]
    assert [row["dp_replicate*tp"] for row in found] == [15] * 4
    assert [row["cp"] for row in found] == [1, 2, 4, 8]
    # The axis of size 1 costs no call.
    assert [row["calls"] for row in found] == [3] * 4
    turned = ranks4.run(sum_along_axes, "dp_replicate=2 tp=2 order=tp+dp_replicate")
    # rank = tp * 2 + dp_replicate; names are unchanged
    assert [row["tp"] for row in turned] == [5, 10, 5, 10]
    assert [row["dp_replicate"] for row in turned] == [3, 3, 12, 12]
    assert [row["dp_replicate*tp"] for row in turned] == [15] * 4


def test_expert_axes_divide_the_ranks_of_a_replica():
    plan = Plan(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4, zero=1)
    mesh = Mesh.__new__(Mesh)
    mesh.plan = plan
    for rank in range(plan.world_size):
        mesh.rank = rank
        inside = rank % 8
        assert mesh.ranks_over(("ep",)) == tuple(rank - inside % 4 + step for step in range(4))
        assert mesh.ranks_over(("beside_ep",)) == tuple(rank - inside + inside % 4 + step for step in (0, 4))
        both = mesh.ranks_over(("beside_ep", "dp_replicate"))
        assert both == tuple(inside % 4 + step for step in (0, 4, 8, 12))
        assert mesh.ranks_over(("ep", "beside_ep")) == mesh.ranks_over(("dp_shard", "cp", "tp"))


def test_neighbors_on_an_axis_and_the_ends_of_a_pipeline():
    mesh = Mesh.__new__(Mesh)
    mesh.plan = Plan(pp=3, dp_replicate=2, tp=4)
    mesh.rank = 6  # the last pair of tp, on the second replica of the first stage
    assert mesh.ranks_over(("tp/2",)) == (6, 7)
    assert mesh.ranks_over(("dp_replicate", "tp/2")) == (2, 3, 6, 7)
    assert mesh.ranks_over(("ends",)) == (6, 22)
    mesh.rank = 22
    assert mesh.ranks_over(("ends", "dp_replicate")) == (2, 6, 18, 22)


def test_expert_axis_cannot_be_joined_with_its_parts():
    with pytest.raises(PlanError) as caught:
        build_mesh(Plan())["ep", "tp"]
    assert str(caught.value) == (
        "mesh axes ep and tp: ep is a view over dp_shard x cp x tp, so it joins none of them. "
        "Join it with beside_ep, dp_replicate or pp."
    )


def sum_along_experts(plan_text: str) -> list[float]:
    from weft.comm.collectives import all_reduce

    mesh = build_mesh(Plan.parse(plan_text))
    axes = (mesh["ep"], mesh["beside_ep"], mesh["dp_replicate", "beside_ep"], mesh.batch)
    return [float(all_reduce(torch.tensor(2.0**mesh.rank), axis)) for axis in axes]


def test_experts_have_groups_of_real_ranks(ranks4):
    # rank = cp * 2 + tp: experts are divided over tp, and equal over cp.
    assert ranks4.run(sum_along_experts, "cp=2 tp=2 ep=2") == [
        [3, 5, 5, 5],
        [3, 10, 10, 10],
        [12, 5, 5, 5],
        [12, 10, 10, 10],
    ]


def groups_of_some_and_all_ranks() -> list[int]:
    """Two ranks create a group without the others; then all create groups of two."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    if rank in (0, 3):
        join_group((0, 3), "test")
    others = (0, 2) if rank % 2 == 0 else (1, 3)
    number = torch.tensor([rank])
    dist.all_reduce(number, group=join_group(others, "test"))
    return number.tolist()


def test_groups_of_some_ranks_do_not_affect_later_groups(ranks4):
    assert ranks4.run(groups_of_some_and_all_ranks) == [[2], [4], [2], [4]]


def test_loopback_store_listens_only_on_loopback():
    store = loopback_store("127.0.0.1", 0)
    listening = {
        connection.laddr
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == store.port
    }
    assert {address.ip for address in listening} == {"127.0.0.1"}
    with pytest.raises(OSError, match="in use"):
        loopback_store("127.0.0.1", store.port)


def join_twice(port: int) -> list[float]:
    """Join like a script under torchrun that calls weft.init twice, or after close."""
    rank = dist.get_rank()
    env.set_for_children(TORCHELASTIC_USE_AGENT_STORE="True")
    dist.destroy_process_group()
    place = env.RankEnv(rank, 2, rank, 2, "127.0.0.1", port, "torchrun")
    sums = []
    for _ in range(2):
        join_ranks(place, torch.device("cpu"))
        first = dist.group.WORLD
        for plan in (Plan(dp_replicate=2), Plan(dp_shard=2)):
            join_ranks(place, torch.device("cpu"))
            assert dist.group.WORLD is first
            sums.append(all_reduce(torch.ones(1), build_mesh(plan).data).item())
        with pytest.raises(CommError, match=r"initialised as rank \d of 2, but .* rank 0 of 3"):
            join_ranks(env.RankEnv(0, 3, 0, 3, "127.0.0.1", port, "torchrun"), torch.device("cpu"))
        if len(sums) == 2:
            leave_ranks()
    return sums


def test_joining_twice_reuses_the_group_and_after_leaving_makes_a_new_one():
    store = loopback_store("127.0.0.1", 0)
    with RankPool(2) as pool:
        assert pool.run(join_twice, store.port) == [[2.0] * 4] * 2


def test_group_is_never_split_from_the_world_group(monkeypatch):
    """With a bound device torch would have NCCL split the group, which all ranks must join; only the members do."""
    asked = []
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", lambda *given: asked.append(given))
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        device = torch.device("cuda", 0)
        dist.group.WORLD.bound_device_id = device
        dist.new_group([0, 1], use_local_synchronization=True)
        assert len(asked) == 1
        assert join_group((0, 2)).size() == 2
        assert len(asked) == 1
        assert dist.group.WORLD.bound_device_id == device
    finally:
        dist.destroy_process_group()


def group_timeouts() -> tuple[float, float, float]:
    """Return timeouts in seconds for the world group, a new group, and one created while the default is 77."""
    from unittest.mock import patch

    from weft.comm import mesh as module
    from weft.comm.private_torch import backend_of, timeout_s
    from weft.private_torch import default_timeout

    mesh, cpu = build_mesh(Plan.parse("tp=2 dp_shard=2")), torch.device("cpu")
    default = default_timeout()
    with patch.object(module, "default_timeout", lambda: datetime.timedelta(seconds=77)):
        group = module.join_group(mesh.ranks_over(("tp",)), "limit")
    return timeout_s(backend_of(mesh.world.group, cpu)), default.total_seconds(), timeout_s(backend_of(group, cpu))


def test_new_groups_have_the_timeout_of_the_world_group(ranks4):
    """torch gives a new group 30 minutes, for any timeout of the ranks: a hang would outlast launch.timeout."""
    for everyone, default, some in ranks4.run(group_timeouts):
        assert everyone == default
        assert some == 77.0
