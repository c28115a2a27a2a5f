"""One gradient norm over all gradients of a rank, and the factor that clips it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.private_torch import foreach_norm


def global_norm(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the euclidean norm of all tensors as one vector: 0-d, float64 for float64 gradients, else float32."""
    if not grads:
        return torch.zeros(())
    norms = foreach_norm(list(grads), 2.0, dtype=torch.promote_types(grads[0].dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that brings a gradient of `norm` to at most `max_norm`; 1.0 when it is within, or that is 0.

    The same formula as torch.nn.utils.clip_grad_norm_, its small constant too: a run that moves over goes on unchanged.
    """
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0
