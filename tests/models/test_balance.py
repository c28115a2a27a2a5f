"""Balancing losses and dropping do not depend on how a batch is split, and count once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models.experts import Load, Span, attach, count_tokens, keep_within, move_bias, sequence_loss

E, K, T = 5, 2, 8


def routed(num_sequences: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(num_sequences, T, E, generator=generator, dtype=torch.float64).softmax(-1)
    return probs.topk(K, -1).indices, probs


def test_sequence_loss_matches_the_paper():
    """DeepSeek-V3 (arXiv 2412.19437), equations 17 to 20, times the tokens of each sequence."""
    ids, probs = routed(3)
    expected = 0.0
    for ids_TK, probs_TE in zip(ids, probs, strict=True):
        for expert in range(E):
            f = E / (K * T) * float((ids_TK == expert).sum())
            expected += T * f * float(probs_TE[:, expert].mean())
    assert float(sequence_loss(count_tokens(ids, E), probs, K, Span())) == pytest.approx(expected, rel=1e-13)


def test_balanced_load_has_loss_one_per_token():
    ids = torch.tensor([[[0], [1], [2], [3]]])
    even, lopsided = torch.full((1, 4, 4), 0.25), torch.zeros(1, 4, 4).index_fill_(2, torch.tensor([0]), 1.0)
    assert float(sequence_loss(count_tokens(ids, 4), even, 1, Span())) == 4.0
    assert float(sequence_loss(count_tokens(torch.zeros_like(ids), 4), lopsided, 1, Span())) == 16.0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 99))
def test_loss_and_gradient_do_not_depend_on_batching(sizes, seed):
    ids, probs = routed(sum(sizes), seed)
    whole, cut = probs.clone().requires_grad_(), probs.clone().requires_grad_()
    total = sequence_loss(count_tokens(ids, E), whole, K, Span())
    parts = [
        sequence_loss(count_tokens(some_ids, E), some, K, Span())
        for some_ids, some in zip(ids.split(sizes), cut.split(sizes), strict=True)
    ]
    torch.testing.assert_close(total, sum(parts), rtol=1e-12, atol=0)
    total.backward()
    sum(parts).backward()
    torch.testing.assert_close(whole.grad, cut.grad, rtol=1e-12, atol=0)


def reference_keep(ids_TK, capacity):
    taken, kept = dict.fromkeys(range(E), 0), []
    for experts in ids_TK.tolist():
        kept.append([taken[expert] < capacity for expert in experts])
        for expert in experts:
            taken[expert] += 1
    return kept


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.sampled_from([0.1, 0.5, 1.0, 1.25, 9.0]), st.integers(0, 999))
def test_expert_keeps_first_tokens_of_each_sequence_up_to_capacity(num_sequences, factor, seed):
    ids, _ = routed(num_sequences, seed)
    capacity = {0.1: 1, 0.5: 2, 1.0: 4, 1.25: 4, 9.0: 29}[factor]  # of T * K / E = 3.2
    keep = keep_within(ids, E, factor, Span())
    assert keep.tolist() == [reference_keep(ids_TK, capacity) for ids_TK in ids]


@pytest.mark.parametrize(("factor", "tokens", "experts", "capacity"), [
    (1.1, 100, 10, 11), (1.0, 10, 2, 5), (1.01, 10, 2, 6), (0.001, 10, 2, 1),
])  # fmt: skip
def test_capacity_is_rounded_up_without_rounding_errors(factor, tokens, experts, capacity):
    ids = torch.zeros(1, tokens, 1, dtype=torch.int64)
    assert int(keep_within(ids, experts, factor, Span()).sum()) == capacity


def test_dropping_does_not_depend_on_later_tokens():
    ids, _ = routed(1)
    other = ids.clone()
    other[:, 5:] = 0
    # The capacity depends on the length, so the sequences have equal length.
    assert keep_within(ids, E, 0.5, Span())[:, :5].equal(keep_within(other, E, 0.5, Span())[:, :5])


def test_loss_is_added_in_backward_and_counted_once():
    load, weights = Load(3), torch.ones(4, dtype=torch.float64, requires_grad=True)
    source = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    for _ in range(2):  # a forward without backward, like that of a recompute
        out = attach(weights, source * 5, 0.25, torch.tensor([1, 2, 3]), load)
    assert load.tokens_E is None
    (out * 2).sum().backward()
    assert source.grad == 5 * 0.25
    assert weights.grad.tolist() == [2.0] * 4
    assert (load.tokens_E.tolist(), float(load.aux_sum)) == ([1, 2, 3], 10.0)
    load.clear()
    assert load.tokens_E is None


def test_bias_moves_by_full_steps_towards_a_balanced_load():
    bias = torch.tensor([0, 5, -7, 0])
    move_bias(bias, torch.tensor([10, 2, 4, 4]), 0.001)  # a balanced share is 5
    assert bias.tolist() == [-1000, 1005, 993, 1000]
    move_bias(bias, torch.tensor([3, 3, 3, 3]), 0.001)
    assert bias.tolist() == [-1000, 1005, 993, 1000]
