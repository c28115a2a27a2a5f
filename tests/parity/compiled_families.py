"""Deep transformers models, called as in a user's script: without use_cache=False."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.parity.families import FAMILIES, Family, FamilyCase

#: DEEP has more blocks than torch.compile's recompilation limit.
SHALLOW, DEEP = 2, 10
#: Families that call every block with the same arguments. The experts implementation supports float64 and graphs.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {}, "gpt2": {}, "bert": {}, "olmo2": {},
    "mixtral": {"experts_implementation": "batched_mm"},
}  # fmt: skip


@dataclass(frozen=True)
class DeepFamily(FamilyCase):
    """A family with `depth` blocks."""

    depth: int = SHALLOW

    @property
    def family(self) -> Family:
        known = FAMILIES[self.name]
        depth = {"n_layer" if "n_layer" in known.settings else "num_hidden_layers": self.depth}
        return dataclasses.replace(known, settings={**known.settings, **SETTINGS[self.name], **depth})

    def model(self) -> nn.Module:
        """Return the model. OLMo 2's norms are replaced by float64 ones: float32 sums would depend on sharding."""
        model = super().model()
        if self.name == "olmo2":
            for norm in model.modules():
                if type(norm).__name__ == "Olmo2RMSNorm":
                    norm.__class__ = _wide_norm(type(norm))
        return model

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=batch["input_ids"]).logits


@functools.cache
def _wide_norm(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * scaled).to(x.dtype)

    return type("Olmo2RMSNorm", (kind,), {"forward": forward})
