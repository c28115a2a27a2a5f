"""A decoder's shape as the planner asks it: by layer, by stage and by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.spec import shares
from weft.spec.model import DecoderWidths


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(DecoderWidths):
    """Widths and counts of a decoder, in values (no bytes), and what a division of it gives a rank."""

    @property
    def moe_share(self) -> float:
        """Of the layers, those with experts."""
        return self.moe_layers / self.layers

    @property
    def dense_share(self) -> float:
        """Of the layers, those without experts."""
        return (self.layers - self.moe_layers) / self.layers

    def cut_widths(self, t: Any) -> tuple[Any, Any]:
        """Return the widths of queries and of keys on one of `t` tensor-parallel ranks (numbers or numpy arrays)."""
        return np.ceil(self.heads / t) * self.head_dim, np.ceil(self.kv_heads / t) * self.head_dim

    def ffn_widths(self, t: Any) -> tuple[Any, Any]:
        """Return the columns of one product that goes up, of a mean layer on one of `t` tensor-parallel ranks.

        Those of dense feed-forward parts, and those of the experts that a token visits with the shared ones.
        """
        return self.dense_share * self.ffn / t, self.moe_share * (self.top_k * self.expert_ffn + self.shared_ffn) / t

    @property
    def crossings(self) -> float:
        """Tensors of a token that go from a stage of a pipeline to the next."""
        return 1.0

    @property
    def layer_weights(self) -> float:
        """What the runtime weighs a layer with to divide layers into stages: the parameters of the commonest kind."""
        mostly_mixtures = 2 * self.moe_layers >= self.layers
        return float(max(1, self.moe_layer_params if mostly_mixtures else self.dense_layer_params))

    @property
    def head_weights(self) -> float:
        """The same of the head."""
        return float(self.table_params)

    def stage_layers(self, num_stages: int) -> tuple[int, ...]:
        """Return the layers of each stage, from the embedding on, as the runtime divides them.

        Raises:
            ValueError: for too few layers.
        """
        return shares.divide_layers([1.0] * self.layers, num_stages, after=self.head_weights / self.layer_weights)
