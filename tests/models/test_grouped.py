"""Sorting rows by expert and grouped products, compared with loops in forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models.experts import combine_rows, grouped_kernel, grouped_linear, permute_rows, scatter_rows, sort_by_expert

CPU = torch.device("cpu")


def rounds(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_grouped_linear_matches_a_loop_over_experts(counts, dim_in, dim_out, seed):
    x, w = rounds(sum(counts), dim_in, seed=seed), rounds(len(counts), dim_out, dim_in, seed=seed + 1)
    ends = torch.tensor(counts).cumsum(0).int()
    ours = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    theirs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    out = grouped_linear(*ours, ends)
    parts = theirs[0].split(counts)
    expected = torch.cat([part @ matrix.T for part, matrix in zip(parts, theirs[1], strict=True)])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    grad = rounds(*out.shape, seed=seed + 2)
    out.backward(grad)
    expected.backward(grad)
    for our, their in zip(ours, theirs, strict=True):
        assert our.grad is not None  # also without rows
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_and_loop_agree(dtype):
    counts = [3, 0, 5]
    x, w = rounds(8, 16).to(dtype), rounds(3, 24, 16).to(dtype)
    ends = torch.tensor(counts).cumsum(0).int()
    assert grouped_kernel(dtype, CPU, 16, 24) == "kernel"
    results = []
    for shape in (slice(None), slice(0, 23)):  # 23 columns are not aligned, so they use the loop
        leaves = [x.clone().requires_grad_(), w[:, shape].clone().requires_grad_()]
        out = grouped_linear(*leaves, ends)
        out.backward(torch.ones_like(out))
        results.append((out[:, :23].float(), leaves[1].grad[:, :23].float()))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("dtype", "device", "widths", "way"), [
    (torch.float64, CPU, (16, 16), "loop"),
    (torch.float32, CPU, (16, 16), "kernel"),
    (torch.float32, CPU, (16, 15), "loop"),
    (torch.bfloat16, CPU, (8, 8), "kernel"),
    (torch.bfloat16, CPU, (4, 8), "loop"),
    (torch.float32, torch.device("meta"), (16, 16), "loop"),
    (torch.float32, torch.device("cuda", 0), (16, 16), "loop"),
    (torch.float64, torch.device("cuda", 0), (16, 16), "loop"),
])  # fmt: skip
def test_kernel_is_chosen_by_dtype_device_and_width(dtype, device, widths, way):
    assert grouped_kernel(dtype, device, *widths) == way


def test_gpu_kernel_requires_ampere(monkeypatch):
    gpu = torch.device("cuda", 0)
    for capability, way in {(9, 0): "kernel", (8, 0): "kernel", (7, 5): "loop"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert grouped_kernel(torch.bfloat16, gpu, 64, 64) == way


def test_autocast_applies_to_the_grouped_product():
    ends = torch.tensor([2, 4]).int()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_linear(torch.randn(4, 8), torch.randn(2, 8, 8), ends).dtype == torch.bfloat16


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 3), st.integers(1, 5), st.booleans(), st.integers(0, 99))
def test_tokens_are_routed_and_combined_with_their_weights(num_tokens, top_k, num_experts, drops, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(num_experts + drops, (num_tokens, top_k), generator=generator)
    x, weights = rounds(num_tokens, 4, seed=seed), rounds(num_tokens, top_k, seed=seed + 1)
    order = sort_by_expert(ids, num_experts, drops)
    ours = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    rows = scatter_rows(ours[0], order)
    starts = [0, *order.ends_E.tolist()[:-1]]
    factors = torch.cat([
        torch.full((end - start, 1), expert + 2.0, dtype=torch.float64)
        for expert, (start, end) in enumerate(zip(starts, order.ends_E.tolist(), strict=True))
    ])  # fmt: skip
    out = combine_rows(rows * factors, ours[1], order)  # expert e multiplies by e + 2
    theirs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    strength = (ids + 2.0).masked_fill(ids == num_experts, 0.0)
    expected = theirs[0] * (theirs[1] * strength).sum(1, keepdim=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    out.square().sum().backward()
    expected.square().sum().backward()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.grad, their.grad, rtol=1e-11, atol=1e-11)


def test_rows_of_one_expert_keep_their_token_order():
    order = sort_by_expert(torch.tensor([[1, 0], [1, 2], [0, 1]]), 3, drops=False)
    assert order.source_R.tolist() == [1, 4, 0, 2, 5, 3]
    assert order.ends_E.tolist() == [2, 5, 6]


def test_permutation_is_inverted_in_backward():
    index = torch.tensor([2, 0, 1])
    x = rounds(3, 2).requires_grad_()
    permute_rows(x, index, index.argsort()).backward(rounds(3, 2, seed=1))
    torch.testing.assert_close(x.grad[index], rounds(3, 2, seed=1))
