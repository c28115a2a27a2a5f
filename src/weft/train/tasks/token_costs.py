"""Cost of tokens, from the weights of blocks and their attention, in multiply-adds (half of the FLOPs)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Work of a transformer: `weights` for each token, and `per_pair` for each pair of tokens in attention."""

    weights: float
    per_pair: float

    @staticmethod
    def of(module: nn.Module, num_layers: int, dim: int) -> TokenCosts:
        """Compute the costs of a module with attention blocks. Embedding lookups cost nothing.

        Args:
            module: the transformer.
            num_layers: number of blocks.
            dim: width.
        """
        from torch import nn

        tables = {id(one.weight) for one in module.modules() if isinstance(one, nn.Embedding)}
        weights = sum(param.numel() for param in module.parameters() if id(param) not in tables)
        # A token costs 2 FLOPs for each weight, and 4 for each attended token, for each feature of each layer.
        return TokenCosts(float(weights), 2.0 * num_layers * dim)

    def work(self, tokens: Any) -> np.ndarray:
        """Return the work of sequences of the given lengths, in the same shape."""
        asked = np.asarray(tokens, np.float64)
        return asked * (self.weights + self.per_pair * asked)
