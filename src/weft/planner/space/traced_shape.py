"""The shape of a model that was traced: the widths that it has, and the trace that says all else."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from weft.planner.space.shape import Shape
from weft.spec import DecoderSpec, TracedModel
from weft.spec.traced import TracedLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedShape(Shape):
    """The widths that a traced model has, and the trace that says all else. Without a sequence, a sample is a token."""

    traced: TracedModel

    @property
    def num_params(self) -> int:
        return self.traced.num_params

    @property
    def dense_layer_params(self) -> int:
        return round(self.mean(lambda layer: layer.num_params))

    @property
    def crossings(self) -> float:
        return self.traced.crossings

    def mean(self, value: Callable[[TracedLayer], Any]) -> Any:
        """Return the mean of a number over all layers."""
        return sum(layer.count * value(layer) for layer in self.traced.layers) / self.traced.num_layers

    @classmethod
    def of(cls, traced: TracedModel) -> TracedShape:
        """Return the shape of a description."""
        attention = traced.attention
        return cls(
            vocab=traced.vocab,
            hidden=traced.hidden,
            layers=traced.num_layers,
            heads=attention.heads if attention else 1,
            kv_heads=attention.kv_heads if attention else 1,
            head_dim=attention.head_dim if attention else 1,
            ffn=0,
            tied=traced.tied,
            traced=traced,
        )

    @staticmethod
    def as_rules_see_it(traced: TracedModel) -> DecoderSpec:
        """Return heads, widths and layers of a traced model; what else it forbids is in its limits."""
        attention = traced.attention
        legal = math.lcm(*dict(traced.limits)["tp"].values) if "tp" in dict(traced.limits) else 1
        return DecoderSpec(
            vocab_size=max(1, traced.vocab),
            dim=traced.hidden,
            num_layers=traced.num_layers,
            num_heads=attention.heads if attention else legal,
            num_kv_heads=attention.kv_heads if attention else legal,
            ffn_dim=legal,
            max_seq_len=traced.max_seq_len,
            tied=traced.tied,
        )
