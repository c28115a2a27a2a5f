"""Context parallelism arithmetic: balanced chunks, and a cp_mode for every shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.partitioning import RING_TOKENS, choose_cp_mode, chunks_of, num_chunks, sent_bytes, ulysses_fits

MODES = ("gather", "ring", "ulysses")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODES), st.integers(1, 300))
def test_chunks_cover_the_sequence_and_zigzag_balances_work(mode, cp):
    chunks = [chunks_of(mode, cp, rank) for rank in range(cp)]
    assert sorted(chunk for part in chunks for chunk in part) == list(range(num_chunks(mode, cp)))
    assert all(list(part) == sorted(part) for part in chunks)
    if mode != "ulysses":
        # A query of chunk i attends to chunks up to i, so the sum measures a rank's work.
        assert len({sum(part) for part in chunks}) == 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "tp", "fits"),
    [(32, 32, 4, 1, True), (32, 8, 8, 1, True), (32, 8, 16, 1, True), (32, 2, 8, 4, True), (32, 8, 3, 1, False),
     (24, 4, 6, 1, False), (32, 8, 8, 8, False), (6, 1, 3, 2, True), (8, 8, 8, 16, False)],
)  # fmt: skip
def test_ulysses_fits_divisible_heads(heads, kv_heads, cp, tp, fits):
    assert ulysses_fits(cp, heads, kv_heads, tp) is fits


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cp", "seq_len", "mode"),
    [
        (32, 32, 4, 1 << 17, "ulysses"),  # all heads have keys: a share of the heads is smaller than all keys
        (32, 8, 4, 1 << 17, "ring"),  # few keys: they are smaller than queries and outputs
        (32, 8, 4, 4 * RING_TOKENS - 8, "gather"),
        (32, 8, 8, 1 << 17, "ulysses"),
        (31, 31, 4, 1 << 17, "ring"),
        (32, 8, 4, 36, "ulysses"),  # divisible into four chunks, but not eight
        (32, 8, 1, 36, "gather"),
    ],
)
def test_auto_mode_for_chosen_shapes(heads, kv_heads, cp, seq_len, mode):
    assert choose_cp_mode("auto", cp, heads, kv_heads, seq_len) == mode


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 16), st.integers(1, 64), st.integers(1, 8), st.integers(1, 4), st.integers(1, 10**6))
def test_auto_mode_is_supported_and_ulysses_sends_no_more(cp, kv_heads, group, tp, seq_len):
    heads = kv_heads * group
    mode = choose_cp_mode("auto", cp, heads, kv_heads, seq_len, tp)
    assert mode in MODES
    if mode != "ulysses":
        return
    assert ulysses_fits(cp, heads, kv_heads, tp)
    if seq_len % (2 * cp) == 0:
        shape = {"cp": cp, "tokens": 1, "num_heads": heads // tp, "num_kv_heads": max(1, kv_heads // tp)}
        costs = [
            sent_bytes(name, **shape, head_dim=1, itemsize=2, sum_itemsize=4, backward=False)
            for name in ("ulysses", "gather")
        ]
        assert costs[0] <= costs[1]


@pytest.mark.parametrize("mode", MODES)
def test_explicit_mode_is_used(mode):
    assert choose_cp_mode(mode, 4, 7, 7, 13) == mode
