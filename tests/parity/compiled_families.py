"""Deep models of transformers as people call them: nobody tells them use_cache=False."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.parity.families import FAMILIES, Family, FamilyCase

#: More blocks than torch.compile compiles anew before it gives up.
SHALLOW, DEEP = 2, 10
#: Families in which every block is called alike. Experts multiply in a form that float64 has and a graph can hold.
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

    def forward(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(input_ids=batch["input_ids"]).logits
