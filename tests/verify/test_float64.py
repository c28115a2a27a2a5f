"""In this mode nothing is rounded to float32, in forward or in recompute."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from weft.verify.verifier import Float64Throughout


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    y = y.to(torch.float32) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))
    return torch.softmax(y, -1, dtype=torch.float32).to(x.dtype) * weight


def test_casts_of_float64_are_no_ops_and_others_are_unchanged():
    x, weight = torch.randn(3, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    with Float64Throughout():
        assert x.float().dtype == x.to(torch.float32).dtype == x.to(dtype=torch.float32).dtype == torch.float64
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
        exact = norm(x, weight)
    rounded = norm(x, weight)
    assert 0 < float((exact - rounded).abs().max()) < 1e-6


def test_recompute_in_backward_matches_the_forward():
    grads = []
    for replays in (False, True):
        x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        weight = torch.arange(4, dtype=torch.float64).requires_grad_()
        with Float64Throughout():
            out = checkpoint(norm, x, weight, use_reentrant=False) if replays else norm(x, weight)
            out.square().sum().backward()
        grads.append((x.grad, weight.grad))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)
