"""Optimizer steps as Triton kernels: one launch, one pass over memory.

Triton comes with torch for CUDA. Arithmetic is fp32 for every dtype of gradient and weights. Tests run the same code in
Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Triton is untyped, and only torch for CUDA includes it.
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportIndexIssue=false


#: Elements per program.
BLOCK = 2048


@triton.jit
def _adam(
    master,
    grad,
    exp_avg,
    exp_avg_sq,
    weights,
    numel,
    factor,
    dials,
    lr,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    step_size,
    root_correction2,
    decoupled: tl.constexpr,
    reads: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
):
    if reads:
        lr = tl.load(dials).to(tl.float32)
        step_size = tl.load(dials + 2).to(tl.float32)
        root_correction2 = tl.load(dials + 3).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    times = tl.load(factor).to(tl.float32)
    known = (
        tl.zeros([block], tl.float32) + times
    )  # a block, because triton's interpreter cannot combine a block and a scalar
    inside = (at < numel) & (known == known)  # NaN skips the step
    p = tl.load(master + at, mask=inside)
    g = tl.load(grad + at, mask=inside).to(tl.float32) * times
    m = tl.load(exp_avg + at, mask=inside)
    v = tl.load(exp_avg_sq + at, mask=inside)
    if decoupled:
        p -= p * (lr * decay)
    else:
        g += p * decay
    m += (g - m) * rest1
    v = v * beta2 + g * g * rest2
    p -= step_size * m / (tl.sqrt(v) / root_correction2 + eps)
    tl.store(master + at, p, mask=inside)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    if rounds:
        tl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _sgd(
    master,
    grad,
    buffer,
    weights,
    numel,
    factor,
    dials,
    lr,
    momentum,
    decay,
    remembers: tl.constexpr,
    nesterov: tl.constexpr,
    reads: tl.constexpr,
    rounds: tl.constexpr,
    block: tl.constexpr,
):
    if reads:
        lr = tl.load(dials).to(tl.float32)
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    times = tl.load(factor).to(tl.float32)
    known = tl.zeros([block], tl.float32) + times
    inside = (at < numel) & (known == known)
    p = tl.load(master + at, mask=inside)
    g = tl.load(grad + at, mask=inside).to(tl.float32) * times + p * decay
    if remembers:
        b = tl.load(buffer + at, mask=inside) * momentum + g
        tl.store(buffer + at, b, mask=inside)
        if nesterov:
            g += b * momentum
        else:
            g = b
    p -= g * lr
    tl.store(master + at, p, mask=inside)
    if rounds:
        tl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)


def launch_adam(tensors: Any, factor: Any, dials: Any, scalars: tuple[float, ...], decoupled: bool) -> None:
    """Update master, moments and weights by a step of Adam.

    Args:
        tensors: (master, grad, exp_avg, exp_avg_sq, weights or None). grad is only read.
        factor: 0-d factor of the gradient. NaN skips the step.
        dials: `AdamRule.dials` on the device, which replace lr and the corrections, or None.
        scalars: lr, beta1, beta2, eps, weight decay, correction1, correction2.
        decoupled: True for weight decay as in AdamW.
    """
    master, grad, exp_avg, exp_avg_sq, weights = tensors
    lr, beta1, beta2, eps, decay, correction1, correction2 = scalars
    _adam[(triton.cdiv(master.numel(), BLOCK),)](
        master,
        grad,
        exp_avg,
        exp_avg_sq,
        master if weights is None else weights,
        master.numel(),
        factor,
        factor if dials is None else dials,
        lr,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        decay,
        lr / correction1,
        correction2**0.5,
        decoupled=decoupled,
        reads=dials is not None,
        rounds=weights is not None,
        block=BLOCK,
    )


def launch_sgd(tensors: Any, factor: Any, dials: Any, scalars: tuple[float, ...], nesterov: bool) -> None:
    """Update master, momentum and weights by a step of SGD.

    Args:
        tensors: (master, grad, momentum or None, weights or None). grad is only read.
        factor: 0-d factor of the gradient. NaN skips the step.
        dials: `SgdRule.dials` on the device, which replace lr, or None.
        scalars: lr, momentum, weight decay.
        nesterov: True for Nesterov momentum.
    """
    master, grad, buffer, weights = tensors
    _sgd[(triton.cdiv(master.numel(), BLOCK),)](
        master,
        grad,
        master if buffer is None else buffer,
        master if weights is None else weights,
        master.numel(),
        factor,
        factor if dials is None else dials,
        *scalars,
        remembers=buffer is not None,
        nesterov=nesterov,
        reads=dials is not None,
        rounds=weights is not None,
        block=BLOCK,
    )
