"""Context parallelism as arithmetic: balanced chunks, and a way for every shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.partitioning import RING_TOKENS, choose_cp_mode, chunks_of, num_chunks, sent_bytes, ulysses_fits

WAYS = ("gather", "ring", "ulysses")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(WAYS), st.integers(1, 300))
def test_ranks_share_all_chunks_out_and_zigzag_shares_the_work(mode, cp):
    chunks = [chunks_of(mode, cp, rank) for rank in range(cp)]
    assert sorted(chunk for part in chunks for chunk in part) == list(range(num_chunks(mode, cp)))
    assert all(list(part) == sorted(part) for part in chunks)
    if mode != "ulysses":
        # A query of chunk i sees the chunks up to i: the sum says how much attention a rank has.
        assert len({sum(part) for part in chunks}) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "tp", "fits"),
    [(32, 32, 4, 1, True), (32, 8, 8, 1, True), (32, 8, 16, 1, True), (32, 2, 8, 4, True), (32, 8, 3, 1, False),
     (24, 4, 6, 1, False), (32, 8, 8, 8, False), (6, 1, 3, 2, True), (8, 8, 8, 16, False)],
)  # fmt: skip
def test_heads_that_ulysses_can_share_out(heads, kv_heads, cp, tp, fits):
    assert ulysses_fits(cp, heads, kv_heads, tp) is fits


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "seq_len", "mode"),
    [
        (32, 32, 4, 1 << 17, "ulysses"),  # every head of its own: a share of the heads is less than all keys
        (32, 8, 4, 1 << 17, "ring"),  # few keys: they are less than queries and outputs
        (32, 8, 4, 4 * RING_TOKENS - 8, "gather"),
        (32, 8, 8, 1 << 17, "ulysses"),
        (31, 31, 4, 1 << 17, "ring"),
        (32, 8, 4, 36, "ulysses"),  # four chunks come out even, eight do not
        (32, 8, 1, 36, "gather"),
    ],
)
def test_what_auto_takes(heads, kv_heads, cp, seq_len, mode):
    assert choose_cp_mode("auto", cp, heads, kv_heads, seq_len) == mode


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 16), st.integers(1, 64), st.integers(1, 8), st.integers(1, 4), st.integers(1, 10**6))
def test_auto_takes_a_way_that_works_and_ulysses_only_where_it_sends_no_more(cp, kv_heads, group, tp, seq_len):
    heads = kv_heads * group
    mode = choose_cp_mode("auto", cp, heads, kv_heads, seq_len, tp)
    assert mode in WAYS
    if mode != "ulysses":
        return
    assert ulysses_fits(cp, heads, kv_heads, tp)
    if seq_len % (2 * cp) == 0:
        shape = {"cp": cp, "tokens": 1, "num_heads": heads // tp, "num_kv_heads": max(1, kv_heads // tp)}
        costs = [
            sent_bytes(way, **shape, head_dim=1, itemsize=2, sum_itemsize=4, backward=False)
            for way in ("ulysses", "gather")
        ]
        assert costs[0] <= costs[1]


@pytest.mark.parametrize("mode", WAYS)
def test_a_way_that_was_asked_for_is_taken(mode):
    assert choose_cp_mode(mode, 4, 7, 7, 13) == mode
