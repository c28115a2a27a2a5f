from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from weft.optim import muon
from weft.optim.muon import COEFFICIENTS, NUM_ITERATIONS, Muon, orthogonalise


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 24), nn.Linear(24, 8))


def gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in module.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def test_matrices_match_torch_muon_and_others_torch_adamw():
    ours, theirs = model(), model()
    optimizer = Muon(
        [{"params": ours[0].parameters(), "matrices": False}, {"params": ours[1:].parameters()}],
        lr=0.01,
        weight_decay=0.1,
    )
    matrices = [p for p in theirs[1:].parameters() if p.ndim == 2]
    others = [theirs[0].weight, *(p for p in theirs.parameters() if p.ndim == 1)]
    torch_muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    torch_adamw = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(3):
        gradients(ours, step)
        gradients(theirs, step)
        for one in (optimizer, torch_muon, torch_adamw):
            one.step()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4)])
def test_orthogonalized_singular_values_are_near_one(shape):
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape, dtype=torch.float64)))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3


def orthogonalize_one(matrix: torch.Tensor) -> torch.Tensor:
    """Run the iteration of torch.optim.Muon in the matrix's dtype."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm()
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@pytest.mark.parametrize("stack_bytes", [1, 2 * 4 * 64, 2**28])
def test_stacked_matrices_match_single_matrices(stack_bytes, monkeypatch):
    """Use full stacks, stacks of two and single matrices, which are square, wide and tall."""
    monkeypatch.setattr(muon, "STACK_BYTES", stack_bytes)
    generator = torch.Generator().manual_seed(2)
    shapes = [(8, 8), (4, 16), (8, 8), (16, 4), (8, 8), (4, 16)]
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in shapes]
    optimizer, expected = Muon(params, lr=0.1, weight_decay=0.0, momentum=0.0), []
    for param in params:
        param.grad = torch.randn(param.shape, dtype=torch.float64, generator=generator)
        expected.append(param.detach() - 0.1 * 0.2 * max(param.shape) ** 0.5 * orthogonalize_one(param.grad))
    optimizer.step()
    for param, expected_param in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), expected_param, rtol=1e-10, atol=1e-12)


def test_states_are_restored():
    ours = model()
    optimizer = Muon(ours.parameters())
    gradients(ours, 0)
    optimizer.step()
    other = copy.deepcopy(ours)
    again = Muon(other.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for module, chosen in ((ours, optimizer), (other, again)):
        gradients(module, 1)
        chosen.step()
    torch.testing.assert_close(ours.state_dict(), other.state_dict(), rtol=0, atol=0)
