"""What an adapter is, apart from its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

#: Names of an adapter's parameters beside a layer's own.
ADAPTER_PARAMS = ("lora_A", "lora_B", "lora_magnitude")


@dataclass(frozen=True, slots=True)
class AdapterKind:
    """One way to adapt a linear layer.

    rank: rows of A and columns of B. alpha: their product is multiplied by alpha / rank, under rslora by
    alpha / sqrt(rank). kind: "lora", "rslora" or "dora". dropout: share of the adapter's inputs that training drops.
    """

    rank: int
    alpha: float
    kind: str = "lora"
    dropout: float = 0.0

    def __str__(self) -> str:
        drops = f", dropout {self.dropout:g}" if self.dropout else ""
        return f"{self.kind} of rank {self.rank}, alpha {self.alpha:g}{drops}"

    @property
    def scale(self) -> float:
        """The factor of the product of B and A."""
        return self.alpha / (math.sqrt(self.rank) if self.kind == "rslora" else self.rank)


@dataclass(frozen=True, slots=True)
class Adapted:
    """What `add_adapter` did to a model.

    layers: by path, whether the layer keeps its weight transposed. base: "stored", or the format in which linear layers
    keep their weights. packed: by path, the inputs of those that do.
    """

    kind: AdapterKind
    layers: Mapping[str, bool]
    base: str = "stored"
    packed: Mapping[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Adapted:
        """Return what `said` wrote."""
        kind = AdapterKind(said["rank"], said["alpha"], said["kind"], said["dropout"])
        return cls(kind, said["layers"], said.get("base_format", "stored"), said.get("packed", {}))

    def said(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        kind = self.kind
        said = {"rank": kind.rank, "alpha": kind.alpha, "kind": kind.kind, "dropout": kind.dropout}
        packed = {"base_format": self.base, "packed": dict(self.packed)} if self.packed else {}
        return {**said, "layers": dict(self.layers), **packed}

    def params(self) -> Iterator[tuple[str, str]]:
        """Yield (path of the layer, name in it) of each of the adapter's parameters."""
        names = ADAPTER_PARAMS if self.kind.kind == "dora" else ADAPTER_PARAMS[:2]
        return ((path, name) for path in self.layers for name in names)


_RECORD = "_weft_adapted"


def note_adapted(model: nn.Module, record: Adapted | None) -> None:
    """Leave on a whole model what was done to it, for `adapted`; None: it was undone."""
    if record is None:
        delattr(model, _RECORD)
    else:
        setattr(model, _RECORD, record)


def adapted(model: nn.Module) -> Adapted | None:
    """Return what `add_adapter` did to this model, of which a rank may hold a part; None where it did nothing."""
    return getattr(model, _RECORD, None)
