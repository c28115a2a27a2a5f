"""Attention blocks cover each visible pair of tokens exactly once, with windows, causal masks and documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.parallel.context import kernels as kernel
from weft.parallel.context.kernels import BOTH_WAYS, CAUSAL, AttentionBlock, AttentionWindow, Scoring, attention_blocks
from weft.parallel.context.modes import SequenceOrder

MODES = ("gather", "ring", "ulysses")


WINDOWS = st.builds(AttentionWindow, st.none() | st.integers(0, 9), st.none() | st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from(MODES), st.integers(1, 5), st.integers(1, 8), st.integers(1, 3), st.booleans())
def test_each_visible_pair_is_in_one_block(data, mode, cp, length, rows, has_documents):
    seq_len = length * (cp if mode == "ulysses" else 2 * cp)
    starts = st.sets(st.integers(1, max(1, seq_len - 1)).filter(lambda start: start < seq_len))
    borders = [(0, *sorted(data.draw(starts)), seq_len) for _ in range(rows)] if has_documents else None
    window = data.draw(st.just(CAUSAL) | st.just(BOTH_WAYS) | WINDOWS)
    order = SequenceOrder(mode, cp, data.draw(st.integers(0, cp - 1)), seq_len)
    positions = order.positions(torch.device("cpu")).numpy()
    ids = np.zeros((rows, seq_len), dtype=int)
    for row, row_borders in enumerate(borders or ()):
        ids[row] = np.searchsorted(row_borders, np.arange(seq_len), side="right")
    for source in range(cp):
        theirs = SequenceOrder(mode, cp, source, seq_len).positions(torch.device("cpu")).numpy()
        covered = np.zeros((rows, len(positions), len(theirs)), dtype=int)
        for block in attention_blocks(order.chunks(), order.chunks(source), length, borders, window):
            covered[slice(*(block.rows or (0, rows))), block.q0 : block.q1, block.k0 : block.k1] += mask_of(block)
        distance = positions[:, None] - theirs[None]
        expected = np.ones(distance.shape, dtype=bool)
        if window.before is not None:
            expected &= distance <= window.before
        if window.after is not None:
            expected &= -distance <= window.after
        expected = expected & (ids[:, positions][:, :, None] == ids[:, theirs][:, None])
        np.testing.assert_array_equal(covered, expected.astype(int))


def mask_of(block: AttentionBlock) -> np.ndarray:
    """Return the pairs of a block, (queries, keys)."""
    shape = ((block.q1 - block.q0) // block.tiles, (block.k1 - block.k0) // block.tiles)
    triangle = np.tri(*shape, dtype=int)
    tile = {"all": np.ones(shape, dtype=int), "lower": triangle, "upper": triangle.T}[block.shape]
    return np.kron(np.eye(block.tiles, dtype=int), tile)


def test_window_is_few_blocks_without_extra_work():
    found = attention_blocks((3,), (2,), 4096, None, AttentionWindow(127, 0)) + attention_blocks(
        (3,), (3,), 4096, None, AttentionWindow(127, 0)
    )
    assert len(found) <= 8
    assert sum(mask_of(block).sum() if block.tiles == 1 else tiled_pairs(block) for block in found) == 4096 * 128
    assert not attention_blocks((3,), (1,), 4096, None, AttentionWindow(127, 0))


def tiled_pairs(block: AttentionBlock) -> int:
    length = (block.q1 - block.q0) // block.tiles
    return block.tiles * length * (length + 1) // 2


@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_ranks_have_equal_work(mode):
    """Zigzag order: with one document per row, all ranks compute the same number of pairs."""

    def work(rank: int) -> float:
        order = SequenceOrder(mode, 8, rank, 16 * 64)
        found = [block for source in range(8) for block in attention_blocks(order.chunks(), order.chunks(source), 64)]
        return sum((p.q1 - p.q0) * (p.k1 - p.k0) * (0.5 if p.shape == "lower" else 1.0) for p in found)

    assert len({work(rank) for rank in range(8)}) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_unfused_attention_matches_the_fused_kernel(heads, kv_heads, causal, monkeypatch):
    """Compare the fallback for devices without a fused kernel, in several blocks of rows."""
    torch.manual_seed(0)
    keys = 12 if causal else 7
    q, grad = (torch.randn(2, heads, 12, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, kv_heads, keys, 8, dtype=torch.float64) for _ in range(2))
    out, lse = kernel.attend(q, k, v, causal, Scoring(0.4))
    fused = (out, lse, *kernel.attend_backward(grad, q, k, v, out, lse, causal, Scoring(0.4)))
    monkeypatch.setattr(kernel, "_kind", lambda q, scoring, noise: "plain")
    monkeypatch.setattr(kernel, "_SCORES", 2 * heads * keys * 5)
    out, lse = kernel.attend(q, k, v, causal, Scoring(0.4))
    plain = (out, lse, *kernel.attend_backward(grad, q, k, v, out, lse, causal, Scoring(0.4)))
    for ours, theirs in zip(plain, fused, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
