"""One run of each class of operators on a device, compared with the CPU, for `weft doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from weft.devices import access
from weft.errors import WeftError

#: Largest difference from the CPU in float32, relative to the largest value: TF32 and other orders of sums differ.
_ROUNDING = 1e-2
#: Formats that are tried with a matmul.
_FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _DiffersError(WeftError):
    """Results on the device differ from the CPU's."""


def _numbers(*shape: int) -> Tensor:
    """Return the same float32 numbers each time, about -1 to 1, on the CPU."""
    count = torch.tensor(shape).prod().item()
    return torch.sin(torch.arange(count, dtype=torch.float32) * 0.7).view(shape)


def _with_backward(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[torch.device], list[Tensor]]:
    """Return a function that computes outputs and gradients on a device."""

    def run(device: torch.device) -> list[Tensor]:
        leaves = [one.to(device, copy=True).requires_grad_(one.is_floating_point()) for one in inputs]
        output = function(*leaves)
        output.square().sum().backward()
        return [output, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return run


def _embed(ids: Tensor, table: Tensor) -> Tensor:
    rows = F.embedding(ids, table)
    return torch.zeros_like(table).index_add(0, ids.flatten(), rows.flatten(0, 1))


def _reduce(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]).softmax(-1) * x.amax(-1, keepdim=True) + x.cumsum(-1) + x.std()


def _select(x: Tensor) -> Tensor:
    values, places = x.topk(3, dim=-1)
    return values + x.gather(-1, places) + x.where(x > 0, 0.0).sort(-1).values[:, :3]


def _update(device: torch.device) -> list[Tensor]:
    weight = torch.nn.Parameter(_numbers(8, 8).to(device))
    weight.grad = _numbers(8, 8).to(device)
    torch.optim.AdamW([weight], lr=0.1).step()
    return [weight]


def _draw(device: torch.device) -> list[Tensor]:
    """Draw twice with one seed. Other devices than the CPU have other numbers, so only repetition is compared."""
    with access.forked_generators(device):
        torch.manual_seed(1)
        first = torch.randn(1000, device=device)
        torch.manual_seed(1)
        if not torch.equal(first, torch.randn(1000, device=device)):
            raise _DiffersError("one seed gives other numbers the second time")
    if not 0.8 < float(first.std()) < 1.2:
        raise _DiffersError("the numbers are not normally distributed")
    return []


#: Classes of operators: functions of a device that return the results to compare.
_CLASSES: dict[str, Callable[[torch.device], list[Tensor]]] = {
    "matmul": _with_backward(F.linear, _numbers(4, 16, 32), _numbers(24, 32), _numbers(24)),
    "convolution": _with_backward(F.conv2d, _numbers(2, 3, 8, 8), _numbers(4, 3, 3, 3)),
    "attention": _with_backward(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *(_numbers(2, 4, 16, 8) + shift for shift in (0.0, 0.1, 0.2)),
    ),
    "reductions": _with_backward(_reduce, _numbers(6, 16)),
    "embedding": _with_backward(_embed, torch.arange(12).view(3, 4) % 5, _numbers(5, 8)),
    "selection": _with_backward(_select, _numbers(6, 16)),
    "optimizer": _update,
    "random numbers": _draw,
}


def operator_checks(device: torch.device) -> Iterator[tuple[str, str]]:
    """Run each class of operators once. Yield its name, and the cause if it fails or differs from the CPU, else ""."""
    for name, run in _CLASSES.items():
        try:
            difference = _difference(run(device), run(torch.device("cpu")))
            yield name, "" if difference < _ROUNDING else f"differs from the CPU by {difference:.0%}"
        # Backends raise errors of many types for operators that they lack.
        except Exception as error:
            yield name, (str(error).strip().splitlines() or [type(error).__name__])[0]


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference relative to the largest value of a tensor; 0 without tensors, NaN if any is."""
    pairs = ((ours.detach().cpu(), theirs.detach()) for ours, theirs in zip(found, expected, strict=True))
    relative = [((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs]
    return float(torch.stack(relative).max()) if relative else 0.0


def working_precisions(device: torch.device) -> list[str]:
    """Return the precisions in which the device multiplies matrices, among fp64, fp32, bf16 and fp16."""
    found: list[str] = []
    for name, dtype in _FORMATS.items():
        try:
            product = _numbers(8, 8).to(device, dtype) @ _numbers(8, 8).to(device, dtype)
            if bool(product.float().isfinite().all()):
                found.append(name)
        except (RuntimeError, TypeError):  # MPS has no float64 tensors at all
            continue
    return found
