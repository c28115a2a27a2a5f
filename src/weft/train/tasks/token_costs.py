"""What tokens cost, from the weights of blocks and their attention: FLOPs, in the half of a multiply and add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Work of a transformer: each token goes through `weights`, and looks at each other one for `per_pair`."""

    weights: float
    per_pair: float

    @staticmethod
    def of(module: nn.Module, num_layers: int, dim: int) -> TokenCosts:
        """Return those of a module with blocks of attention. Tables, which are looked up, cost nothing.

        Args:
            module: that tokens go through.
            num_layers: blocks.
            dim: width.
        """
        from torch import nn

        tables = {id(one.weight) for one in module.modules() if isinstance(one, nn.Embedding)}
        weights = sum(param.numel() for param in module.parameters() if id(param) not in tables)
        # A token takes 2 FLOPs for each weight, and for each token that it looks at 4 for each feature of each layer.
        return TokenCosts(float(weights), 2.0 * num_layers * dim)

    def work(self, tokens: Any) -> np.ndarray:
        """Return the work of sequences of some lengths, of the same shape."""
        asked = np.asarray(tokens, np.float64)
        return asked * (self.weights + self.per_pair * asked)
