"""From the optimizer section of a config to a torch optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from weft.spec.config import OptimizerSection


def build_optimizer(
    named_params: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection
) -> torch.optim.Optimizer:
    """AdamW or SGD as `section` says, on the trainable parameters.

    Matrices are decayed, vectors (norms, biases) are not. The fused kernels take one pass over memory per step
    where the foreach ones take several; torch has them for CPU and CUDA.
    """
    trainable = [param for _, param in named_params if param.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if section.name == "sgd":
        # torch refuses Nesterov's step without momentum; the config's rule has said so before.
        return torch.optim.SGD(groups, lr=section.lr, momentum=section.momentum, nesterov=section.nesterov, fused=True)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
