"""Optimizer steps in one pass over memory."""

from __future__ import annotations

import math

import pytest
import torch

from weft.optim.one_pass import AdamRule, Lane, SgdRule, adam_kernel, sgd_kernel, step_lane
from weft.optim.step_decision import StepDecision, clip_factor


def test_host_version_of_the_kernels_matches_torch():
    """Check the functions that replace the Triton kernels for small tensors on the simulated GPU."""
    torch.manual_seed(0)
    param, grad = torch.randn(9, dtype=torch.float64, requires_grad=True), torch.randn(9, dtype=torch.float64)
    master, m, v = param.detach().clone(), torch.zeros(9).double(), torch.zeros(9).double()
    weights = torch.empty(9, dtype=torch.bfloat16)
    half = torch.tensor(0.5)
    adam = torch.optim.AdamW([param], lr=0.1, betas=(0.8, 0.9), weight_decay=0.3)
    for step in (1, 2):
        param.grad = grad * 0.5
        adam.step()
        adam_kernel(master, grad, m, v, weights, half, 0.1, 0.8, 0.9, 1e-8, 0.3, 1 - 0.8**step, 1 - 0.9**step, True)
    torch.testing.assert_close(master, param.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(weights, master.bfloat16())
    sgd = torch.optim.SGD([param], lr=0.1, momentum=0.9, weight_decay=0.3, nesterov=True)
    master, momentum = param.detach().clone(), torch.zeros(9).double()
    for _ in (1, 2):
        param.grad = grad * 0.5
        sgd.step()
        sgd_kernel(master, grad, momentum, None, half, 0.1, 0.9, 0.3, True)
    torch.testing.assert_close(master, param.detach(), rtol=1e-12, atol=1e-12)


RULES = {"adam": AdamRule(3, 0.1, 0.8, 0.9, 1e-8, 0.3, True), "sgd": SgdRule(0.1, 0.9, 0.3, True)}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kernel", [False, True])
def test_nan_factor_leaves_everything_unchanged(rule, kernel):
    """A NaN factor on the device skips the step. Any other factor equals a host factor."""
    torch.manual_seed(0)
    start = [torch.randn(9) for _ in range(3 if rule == "adam" else 2)]
    start[-1].abs_()

    def after(factor, grad):
        master, *states = (one.clone() for one in start)
        weights = master.bfloat16()
        if kernel:
            scalars = (0.1, 0.8, 0.9, 1e-8, 0.3, 0.4, 0.2, True) if rule == "adam" else (0.1, 0.9, 0.3, True)
            (adam_kernel if rule == "adam" else sgd_kernel)(
                master, grad, *states, weights, torch.as_tensor(factor), *scalars
            )
        else:
            step_lane(Lane(master, grad, tuple(states), weights), RULES[rule], factor)
        return [master, *states, weights]

    grad = torch.randn(9)
    for one, other in zip(after(torch.tensor(math.nan), grad * math.nan), [*start, start[0].bfloat16()], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(after(torch.tensor(0.3), grad), after(0.3, grad), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(after(0.3, grad)[0], start[0])


@pytest.mark.parametrize("max_norm", [0.0, 0.01, 1e9])
@pytest.mark.parametrize(
    ("numbers", "taken", "finite"),
    [
        ([7.3, 11.0, 0.0, 5.1], True, True),
        ([7.3, 0.0, 0.0, 5.1], False, True),
        ([math.nan, 11.0, 0.0, 5.1], False, False),
        ([7.3, 11.0, 0.0, math.inf], False, False),
    ],
)
def test_device_decision_matches_the_host(numbers, taken, finite, max_norm):
    decision = StepDecision(torch.tensor(numbers, dtype=torch.float64), 8.0, 4.0, max_norm)
    assert (decision.was_taken, bool(decision.is_taken), bool(decision.is_finite)) == (taken, taken, finite)
    assert str(decision.numbers) == str(numbers)
    to_mean = 8.0 / (max(numbers[1], 1.0) * 4.0)
    expected = to_mean * clip_factor(numbers[3] * to_mean, max_norm)
    assert float(decision.factor) == expected if taken else math.isnan(decision.factor)
    assert decision.factor_for(torch.bfloat16).dtype == torch.float32
