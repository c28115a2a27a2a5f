"""The models of `weft.models.recommenders` for the columns of a schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from weft.models.initialize import initialise
from weft.models.recommenders import DeepFm, Dlrm, FeatureTower, IdField, SasRec, TwoTower
from weft.recommend.columns import RecordColumn
from weft.recommend.options import RecommendOptions


class NetworkBuilder:
    """Builds the model of some options.

    Args:
        options: the task's options.
        num_rows: returns the rows of the embedding table of a column, by its name.
    """

    def __init__(self, options: RecommendOptions, num_rows: Callable[[str], int]):
        self._options, self._schema, self._num_rows = options, options.schema, num_rows
        self._hidden = [round(one) for one in options.hidden]

    def shapes(self) -> nn.Module:
        """Return the model on the meta device."""
        with torch.device("meta"):
            return self._network()

    def build(self, seed: int) -> nn.Module:
        """Return the model with initial weights, or without values if torch's default device is meta."""
        model = self.shapes()
        if torch.get_default_device().type != "meta":
            model.to_empty(device="cpu")
            initialise(model, seed)
        return model

    def _network(self) -> nn.Module:
        options, schema = self._options, self._schema
        if options.model == "sasrec":
            rows = self._num_rows(schema.item[0])
            return SasRec(rows, options.length, options.dim, options.layers, options.heads, options.dropout)
        if options.model == "two_tower":
            return TwoTower(self._tower(schema.user), self._tower(schema.item))
        kind = Dlrm if options.model == "dlrm" else DeepFm
        fields = [self._field(one) for one in schema.columns if one.has_ids]
        return kind(fields, len(schema.numbers), options.dim, self._hidden, options.dropout)

    def _tower(self, names: Sequence[str]) -> FeatureTower:
        columns = [self._schema.named(name) for name in names]
        fields = [self._field(one) for one in columns if one.has_ids]
        numbers = [self._schema.numbers.index(one) for one in columns if one.kind == "number"]
        return FeatureTower(fields, numbers, self._options.dim, self._hidden, self._options.dropout)

    def _field(self, column: RecordColumn) -> IdField:
        index = self._schema.ids.index(column) if column.kind == "id" else None
        return IdField(column.module, self._num_rows(column.name), index, column.padding)
