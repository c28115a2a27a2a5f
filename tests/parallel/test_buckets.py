"""Layout of parameters in flat buckets: no overlaps, no losses, and slices join to the full parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.parallel.loops import laid_out
from weft.comm.mesh import Axis
from weft.errors import ModelError
from weft.parallel.state.gradients import data_parallel
from weft.parallel.zero_flat.buckets import ALIGNMENT, Slot, lay_out

_shapes = st.lists(st.integers(0, 7), max_size=3) | st.just([3, 40, 40])
_params = st.lists(st.tuples(_shapes, st.sampled_from([torch.float32, torch.bfloat16]), st.booleans()), max_size=12)


def slots_of(described) -> list[Slot]:
    found = []
    for index, (shape, dtype, turned) in enumerate(described):
        data = torch.zeros(shape, dtype=dtype)
        found.append(Slot(str(index), nn.Parameter(data.mT if turned and data.ndim > 1 else data), 0))
    return found


@settings(max_examples=150, deadline=None)
@given(_params, st.sampled_from([1, 2, 3, 8]), st.integers(1, 4000), st.sampled_from(["none", "some", "all"]))
def test_every_element_has_one_position(described, num_shards, bucket_bytes, unsharded):
    slots = slots_of(described)
    chosen = {slot.name for slot in slots if unsharded == "all" or (unsharded == "some" and int(slot.name) % 2)}
    formats = {slot.param: slot.param.dtype for slot in slots}
    shard = Axis("dp_shard", num_shards, 0, tuple(range(num_shards)))
    buckets = lay_out(slots, formats, torch.float32, shard, whole=frozenset(chosen), bucket_bytes=bucket_bytes)
    assert sorted(slot.name for bucket in buckets for slot in bucket.slots) == sorted(slot.name for slot in slots)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert {formats[slot.param] for slot in bucket.slots} == {bucket.weights.dtype}
        assert bucket.length % ALIGNMENT == 0
        taken = torch.zeros(bucket.size, dtype=torch.int64)
        for slot in bucket.slots:
            assert slot.start % ALIGNMENT == 0
            slot.of(taken).add_(1)
            if slot.name in chosen and slot.numel:
                assert slot.start // bucket.length == (slot.start + slot.numel - 1) // bucket.length
        for gap in bucket.gaps:
            taken[gap] += 1
        assert bool((taken == 1).all())


def test_unsharded_matrices_over_too_many_ranks_are_rejected():
    slots = [Slot(str(index), nn.Parameter(torch.empty(4096, 4096, device="meta")), 0) for index in range(64)]
    formats = {slot.param: slot.param.dtype for slot in slots}
    names = frozenset(slot.name for slot in slots)
    shard = Axis("dp_shard", 8192, 0, tuple(range(8192)))
    assert lay_out(slots, formats, torch.float32, shard)  # sharded at any element, all of them fit
    with pytest.raises(
        ModelError,
        match=r"dp_shard=8192: .* pads 4.00 GiB of weights with 508 GiB. Use dp_shard=64 "
        "or less",
    ):
        lay_out(slots, formats, torch.float32, shard, whole=names)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([(6, 5), (2, 3, 4, 5), (64,), ()]), st.booleans(), st.integers(0, 40), st.integers(1, 30))
def test_slices_join_to_the_full_parameter(shape, turned, start, length):
    data = torch.randn(shape)
    if turned and data.ndim > 1:
        data = data.mT.contiguous().mT
    slot = Slot("p", nn.Parameter(data), start)
    num_parts = -(-(start + slot.numel) // length)
    flat = torch.full((num_parts * length,), torch.nan)
    slot.of(flat).copy_(data)
    owners = 0
    for part in (slice(index * length, (index + 1) * length) for index in range(num_parts)):
        local_slice = slot.view_in(flat[part], part)
        assert (local_slice is not None) == slot.is_in(part)
        if local_slice is not None:
            owners += 1
            assert torch.equal(local_slice, slot.elements_in(data, part))
            assert not local_slice.isnan().any()
            local_slice.fill_(7.0)
    assert bool((slot.of(flat) == 7.0).all())
    assert owners >= 1


def most_full_gradients(plan: str) -> tuple[int, int]:
    """Return the most buckets with a full gradient during backward, and the number of buckets."""
    torch.manual_seed(0)
    model, mesh = laid_out(plan, nn.Sequential(*(nn.Linear(16, 16) for _ in range(10))), bucket_bytes=1024)
    engine, most = data_parallel(model), 0

    def count(_: object) -> None:
        nonlocal most
        most = max(most, sum(bucket.grads is not None for bucket in engine.reducer.buckets))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    for _ in range(2):
        most = 0
        engine.begin_step()
        with engine.microbatch(last=True):
            model(torch.ones(2, 16) + mesh.rank).sum().backward()
        engine.finish()
    return most, len(engine.reducer.buckets)


def test_stage_2_allocates_few_full_gradients(ranks2):
    for most, num_buckets in ranks2.run(most_full_gradients, "dp_shard=2 zero=2"):
        assert num_buckets >= 10
        assert most <= 3
