"""The steps of optimizers that go over memory once."""

from __future__ import annotations

import torch

from weft.optim.one_pass import adam_kernel, sgd_kernel


def test_the_kernels_arithmetic_on_the_host_is_torchs():
    """What the simulated GPU computes of small tensors in the place of the Triton kernels."""
    torch.manual_seed(0)
    param, grad = torch.randn(9, dtype=torch.float64, requires_grad=True), torch.randn(9, dtype=torch.float64)
    master, m, v = param.detach().clone(), torch.zeros(9).double(), torch.zeros(9).double()
    weights = torch.empty(9, dtype=torch.bfloat16)
    adam = torch.optim.AdamW([param], lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    for step in (1, 2):
        param.grad = grad * 0.5
        adam.step()
        adam_kernel(master, grad, m, v, weights, 0.5, 0.1, 0.8, 0.9, 1e-8, 0.3, 1 - 0.8**step, 1 - 0.9**step, True)
    torch.testing.assert_close(master, param.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(weights, master.bfloat16())
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=0.3, nesterov=True)
    master, momentum = param.detach().clone(), torch.zeros(9).double()
    for _ in (1, 2):
        param.grad = grad * 0.5
        sgd.step()
        sgd_kernel(master, grad, momentum, None, 0.5, 0.1, 0.9, 0.3, True)
    torch.testing.assert_close(master, param.detach(), rtol=1e-12, atol=1e-12)
