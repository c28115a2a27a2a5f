"""Host pool: the limit holds, buffers are reused, and pinned memory is unpinned before it is freed."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.errors import LaunchError
from weft.memory.offload import HostPool, host_limit, open_host


class Registry:
    """Records the buffers that are registered with CUDA."""

    def __init__(self):
        self.pinned: set[int] = set()

    def pin(self, buffer):
        assert buffer.data_ptr() not in self.pinned
        self.pinned.add(buffer.data_ptr())

    def unpin(self, buffer):
        self.pinned.remove(buffer.data_ptr())


class PendingCopy:
    waited = 0

    def wait_host(self):
        self.waited += 1


def test_buffer_is_reused_after_its_last_copy():
    pool, last = HostPool(1 << 20), PendingCopy()
    first = pool.take(10_000, "x")
    assert first.nbytes == 12_288
    address = first.data_ptr()
    pool.give_back(first, last)
    assert last.waited == 0
    assert pool.take(11_000, "x").data_ptr() == address
    assert last.waited == 1
    assert (pool.held_bytes, pool.used_bytes, pool.peak_bytes) == (12_288,) * 3


def test_small_request_does_not_reuse_a_much_larger_buffer():
    pool = HostPool(1 << 20)
    pool.give_back(pool.take(400_000, "x"))
    assert pool.take(4_000, "x").nbytes == 4096


def test_free_buffers_are_released_before_the_limit_raises():
    registry = Registry()
    pool = HostPool(100 * 4096, registry.pin, registry.unpin)
    large, small = pool.take(60 * 4096, "x"), pool.take(10 * 4096, "x")
    pool.give_back(large)
    pool.give_back(small)
    del large
    assert pool.take(80 * 4096, "x").nbytes == 80 * 4096  # the 60 pages were freed, the 10 could stay
    assert pool.held_bytes == 90 * 4096
    with pytest.raises(LaunchError) as caught:
        pool.take(51 * 4096, "offload=activations")
    assert str(caught.value) == (
        "offload=activations: this rank needs 524 KiB of host memory for copies, and its limit is 400 KiB. "
        "Put a smaller share on the host, such as offload=activations:0.5, or raise memory.pinned_limit."
    )


def test_memory_is_unpinned_on_release_and_deletion():
    registry = Registry()
    pool = HostPool(1 << 20, registry.pin, registry.unpin)
    in_use, free = pool.take(5, "x"), pool.take(5000, "x")
    pool.give_back(free)
    assert len(registry.pinned) == 2
    pool.release()
    assert registry.pinned == {in_use.data_ptr()}
    assert pool.held_bytes == pool.used_bytes == 4096
    del pool
    gc.collect()
    assert registry.pinned == set()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60_000) | st.none(), max_size=40))
def test_limit_holds_for_any_requests(requests):
    registry = Registry()
    pool, taken = HostPool(40 * 4096, registry.pin, registry.unpin), []
    for size in requests:
        if size is None:
            if taken:
                pool.give_back(taken.pop(0))
            continue
        try:
            taken.append(pool.take(size, "x"))
        except LaunchError:
            assert sum(one.nbytes for one in taken) + size > pool.limit_bytes - 4096
        assert all(one.nbytes >= 1 for one in taken)
        assert len({one.data_ptr() for one in taken}) == len(taken)
        assert pool.used_bytes == sum(one.nbytes for one in taken) <= pool.held_bytes <= pool.limit_bytes
        assert len(registry.pinned) * 4096 <= pool.held_bytes


def test_host_limit_is_divided_over_local_ranks(monkeypatch):
    single_rank = host_limit("50%")
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert host_limit("50%") == single_rank // 4
    assert host_limit("25%") == pytest.approx(single_rank / 8, abs=8)
    assert host_limit("64MiB") == 16 * 2**20


def test_limit_above_machine_memory_is_rejected():
    with pytest.raises(LaunchError, match=r"^memory.pinned_limit=900TB: the ranks .* Use a share, such as .*=60%\.$"):
        host_limit("900TB")


def test_pinned_limit_is_a_size_or_a_share():
    assert open_host(Plan(offload=("optimizer",)), torch.device("cpu"), "1MiB").pool.limit_bytes == 2**20
    for text in ("64GiB", "0.5TB", "1%", "99%", "512MiB"):
        assert RunConfig(memory={"pinned_limit": text}).memory.pinned_limit == text
    for text in ("", "0%", "100%", "64", "0GiB", "-1GiB", "all", "60"):
        with pytest.raises(ValueError, match="pinned_limit"):
            RunConfig(memory={"pinned_limit": text})
