"""Placements: sharding and joining of full tensors for any shape and number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.mesh import build_mesh
from weft.config.plan import Plan
from weft.errors import ModelError
from weft.parallel.state.placement import WHOLE, AxisMap, Placement, merge_placements


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 5),
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    pad=st.integers(0, 4),
)
def test_shards_join_to_the_full_tensor(size, rows, dim, pad):
    shape = [3, 2, 4]
    fused = len(rows) > 1
    shape[dim] = size * sum(rows) - (0 if fused else min(pad, size * sum(rows) - 1))
    placement = Placement(
        cut=("tp",),
        dim=dim,
        parts=tuple(size * number for number in rows) if fused else (),
        pad=size * sum(rows) - shape[dim],
    )
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    parts = [placement.local(full, rank, size) for rank in range(size)]
    assert {tuple(part.shape) for part in parts} == {(*shape[:dim], sum(rows), *shape[dim + 1 :])}
    assert torch.equal(placement.join(parts), full)
    assert placement.full_shape(parts[0].shape, size) == tuple(shape)


@settings(max_examples=30, deadline=None)
@given(heads=st.integers(1, 3), times=st.integers(1, 3), width=st.integers(1, 3))
def test_rows_replicated_on_several_ranks_join(heads, times, width):
    full = torch.arange(float(heads * width * 2)).view(heads * width, 2)
    placements = [
        Placement(
            cut=("tp",),
            index=tuple(range(rank // times * width, (rank // times + 1) * width)),
            whole_shape=(heads * width, 2),
            partial=("tp",),
        )
        for rank in range(heads * times)
    ]
    parts = [placement.local(full, rank, heads * times) for rank, placement in enumerate(placements)]
    indexes = [placement.index for placement in placements]
    assert torch.equal(placements[-1].join(parts, indexes), full)
    assert {placement.num_equal((width, 2), heads * times) for placement in placements} == {times}


def test_fused_segments_are_sharded_separately():
    placement = Placement(cut=("tp",), parts=(4, 2))
    assert placement.local(torch.arange(6), 1, 2).tolist() == [2, 3, 5]


def test_unevenly_dividing_rows_are_rejected():
    with pytest.raises(ModelError) as caught:
        Placement(cut=("tp",)).local(torch.zeros(7, 2), 0, 4)
    assert str(caught.value) == (
        "placement: 7 rows of dim 0 are not a multiple of the 4 ranks of tp. "
        "Give pad=1, or the rows of each rank by index=."
    )
    with pytest.raises(ModelError, match="index= needs the full shape"):
        Placement(cut=("tp",), index=(0, 1))


def test_placements_merge_but_shard_a_parameter_only_once():
    cut, partial = Placement(cut=("tp",), dim=1), Placement(partial=("cp",))
    merged = merge_placements({"a": cut, "b": partial}, {"a": partial}, {"b": cut})
    assert merged == dict.fromkeys(("a", "b"), Placement(cut=("tp",), dim=1, partial=("cp",)))
    with pytest.raises(ModelError, match="parameter 'a': it was sharded over tp and then over ep"):
        merge_placements({"a": cut}, {"a": Placement(cut=("ep",))})


def test_experts_are_sharded_over_ep_only():
    axes = AxisMap(build_mesh(Plan()), {"w": Placement(cut=("ep",), partial=("tp",))}, sharded=True)
    with pytest.raises(ModelError) as caught:
        axes.of("w", (2, 3))
    assert str(caught.value) == (
        "placement of 'w': cut=ep partial=tp: experts are sharded over ep only, and their gradients are summed over "
        "all other ranks. Use cut=('ep',) without partial."
    )


def test_placement_of_unknown_parameter_is_rejected():
    axes = AxisMap(build_mesh(Plan()), {"weigth": WHOLE}, sharded=True)
    with pytest.raises(ModelError) as caught:
        axes.check_names(torch.nn.Linear(2, 2))
    assert str(caught.value) == "placement of 'weigth': the model has no such parameter. Name it as it is now."
