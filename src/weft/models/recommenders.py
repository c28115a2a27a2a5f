"""Recommenders in plain PyTorch: DLRM, DeepFM, two towers and SASRec.

Embedding tables are `tables.NAME` of each model (`user.tables.NAME` and `item.tables.NAME` of two towers), so that a
layout such as "tables.*=rows" shards them.

B samples, F fields, M numbers, D width of embeddings, T items of a sequence, I items, K negative items.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.shapes.decoder_shape import DecoderSpec, shape_problems
from weft.errors import ModelError
from weft.models.attention import see_causally
from weft.models.decoder import Block

#: Standard deviation of initial embeddings.
_TABLE_STD = 0.02

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class IdField:
    """An id column of a model's input.

    Attributes:
        name: name of its table: letters, digits and underscores.
        num_rows: rows of the table.
        index: position of the column in the batch's `ids`; None for a column of lists, whose embeddings are averaged.
        padding: row that is never trained, and that an average leaves out; None for no such row.
    """

    name: str
    num_rows: int
    index: int | None = None
    padding: int | None = None


class FieldEmbeddings(nn.Module):
    """Embeddings of id columns: (B, F, D).

    A batch has `ids` (B, id columns), and for a column of lists `bag.NAME`, all its ids, and `starts.NAME` (B,).
    """

    def __init__(self, fields: Sequence[IdField], dim: int):
        super().__init__()
        self.fields = tuple(fields)
        self.tables = nn.ModuleDict({one.name: _table(one, dim) for one in fields})

    def embed(self, batch: Batch) -> Tensor:
        """Look up all fields."""
        found = [
            self.tables[one.name](batch[f"bag.{one.name}"], batch[f"starts.{one.name}"])
            if one.index is None
            else self.tables[one.name](batch["ids"][:, one.index])
            for one in self.fields
        ]
        return torch.stack(found, 1)


def _table(field: IdField, dim: int) -> nn.Module:
    if field.index is not None:
        table: nn.Module = nn.Embedding(field.num_rows, dim, padding_idx=field.padding)
    else:
        table = nn.EmbeddingBag(field.num_rows, dim, mode="mean", padding_idx=field.padding)
    table.init_std = _TABLE_STD  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType] - read by `initialise`
    return table


class Mlp(nn.Sequential):
    """Linear layers with ReLU, and dropout if its rate is not 0, between them.

    Args:
        widths: width of the input, of the hidden layers and of the output.
        dropout: rate of dropout after each hidden layer.
        ends: apply ReLU to the output too.
    """

    def __init__(self, widths: Sequence[int], dropout: float = 0.0, *, ends: bool = False):
        layers: list[nn.Module] = []
        for index, (width_in, width) in enumerate(pairwise(widths)):
            linear = nn.Linear(width_in, width)
            linear.init_std = math.sqrt(2 / width_in)  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType] - read by `initialise`
            layers.append(linear)
            if ends or index < len(widths) - 2:
                layers.append(nn.ReLU())
                layers += [nn.Dropout(dropout)] if dropout else []
        super().__init__(*layers)


class Dlrm(FieldEmbeddings):
    """DLRM (Naumov et al. 2019, arXiv 1906.00091): products of all pairs of embeddings, and an MLP.

    Args:
        fields: id columns.
        num_numbers: number columns, which an MLP maps to one more embedding.
        dim: width of embeddings.
        hidden: hidden widths of both MLPs.
        dropout: rate in the top MLP.
    """

    def __init__(self, fields: Sequence[IdField], num_numbers: int, dim: int, hidden: Sequence[int], dropout: float):
        super().__init__(fields, dim)
        self.bottom = Mlp([num_numbers, *hidden, dim], ends=True) if num_numbers else None
        num_vectors = len(fields) + bool(num_numbers)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = Mlp([num_pairs + (dim if num_numbers else 0), *hidden, 1], dropout)

    def forward(self, **batch: Tensor) -> Tensor:
        """Return logits, (B,)."""
        vectors = self.embed(batch)
        dense = [] if self.bottom is None else [self.bottom(batch["numbers"])]
        vectors = torch.cat([vectors, *(one[:, None] for one in dense)], 1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = torch.tril_indices(vectors.shape[1], vectors.shape[1], -1, device=vectors.device)
        return self.top(torch.cat([*dense, products[:, first, second]], 1)).squeeze(1)


class DeepFm(FieldEmbeddings):
    """DeepFM (Guo et al. 2017, arXiv 1703.04247): a factorization machine and an MLP on the same embeddings.

    The last column of a table is the weight of the first-order term. Number columns have an embedding that is
    multiplied by the number. Arguments as for `Dlrm`.
    """

    def __init__(self, fields: Sequence[IdField], num_numbers: int, dim: int, hidden: Sequence[int], dropout: float):
        super().__init__(fields, dim + 1)
        self.numbers = nn.Linear(num_numbers, dim + 1, bias=False) if num_numbers else None
        self.deep = Mlp([(len(fields) + num_numbers) * dim, *hidden, 1], dropout)

    def forward(self, **batch: Tensor) -> Tensor:
        """Return logits, (B,)."""
        vectors = self.embed(batch)
        if self.numbers is not None:
            vectors = torch.cat([vectors, self.numbers(torch.diag_embed(batch["numbers"]))], 1)
        first, second = vectors[..., -1], vectors[..., :-1]
        pairs = second.sum(1).square() - second.square().sum(1)
        return first.sum(1) + pairs.sum(1) / 2 + self.deep(second.flatten(1)).squeeze(1)


class FeatureTower(FieldEmbeddings):
    """Maps the columns of a user or an item to a vector of length 1.

    Args:
        fields: id columns.
        numbers: positions of the number columns in the batch's `numbers`.
        dim: width of embeddings and of the vector.
        hidden: hidden widths of the MLP.
        dropout: its rate.
    """

    def __init__(
        self, fields: Sequence[IdField], numbers: Sequence[int], dim: int, hidden: Sequence[int], dropout: float
    ):
        super().__init__(fields, dim)
        self.number_columns = list(numbers)
        self.mlp = Mlp([len(fields) * dim + len(numbers), *hidden, dim], dropout)

    def forward(self, **batch: Tensor) -> Tensor:
        """Return vectors, (B, D)."""
        found = [self.embed(batch).flatten(1)]
        if self.number_columns:
            found.append(batch["numbers"][:, self.number_columns])
        return F.normalize(self.mlp(torch.cat(found, 1)), dim=-1)


class TwoTower(nn.Module):
    """A tower for the user and one for the item (Yi et al. 2019, doi 10.1145/3298689.3346996)."""

    def __init__(self, user: FeatureTower, item: FeatureTower):
        super().__init__()
        self.user, self.item = user, item

    def forward(self, of_items: bool = False, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the vectors of users and items, (B, D) each. With `of_items` the batch has only the items' columns."""
        items = self.item(**batch)
        return items if of_items else self.user(**batch), items


class SasRec(nn.Module):
    """SASRec (Kang and McAuley 2018, arXiv 1808.09781) on the blocks of Weft's decoder of the gpt2 family.

    Args:
        num_items: rows of the table of items; row 0 is padding.
        length: maximum number of items of a sequence.
        dim, num_layers, num_heads: shape of the blocks; the feed-forward layers have 4 * dim hidden units.
        dropout: rate after the embeddings, attention and feed-forward layers.

    Raises:
        ModelError: if the shape breaks a rule of decoders.
    """

    def __init__(self, num_items: int, length: int, dim: int, num_layers: int, num_heads: int, dropout: float):
        super().__init__()
        spec = DecoderSpec(
            family="gpt2", vocab_size=num_items, dim=dim, num_layers=num_layers, num_heads=num_heads,
            num_kv_heads=num_heads, ffn_dim=4 * dim, max_seq_len=length,
        )  # fmt: skip
        if problems := shape_problems(spec):
            raise ModelError("\n".join(str(problem) for problem in problems))
        self.num_items = num_items
        self.tables = nn.ModuleDict({"item": _table(IdField("item", num_items, 0, padding=0), dim)})
        self.pos_embed = nn.Embedding(length, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList([_with_dropout(Block(spec, layer), dropout) for layer in range(num_layers)])
        self.norm = nn.LayerNorm(dim, spec.norm_eps)

    def forward(self, of_items: bool = False, **batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores of candidates for the next item at each position, and the last states, (B, D).

        `items` is int64 (B, T), padded with 0 on the right, and `last` the position of the last item, (B,). The
        candidates are `candidates` (B, T, 1 + K), or all items in the order of their ids if the batch has none; the
        scores are (B, T, 1 + K) or (B, T, I). With `of_items`, return the vectors of the items `ids` twice, (B, D).
        """
        if of_items:
            vectors = self.tables["item"](batch["ids"])
            return vectors, vectors
        items_BT = batch["items"]
        positions_BT = torch.arange(items_BT.shape[1], device=items_BT.device)[None]
        x_BTD = self.drop(self.tables["item"](items_BT) + self.pos_embed(positions_BT))
        visible = see_causally(positions_BT, None, 0, x_BTD.dtype)
        for block in self.blocks:
            x_BTD = block(x_BTD, visible, None)
        x_BTD = self.norm(x_BTD)
        if "candidates" in batch:
            scores = (self.tables["item"](batch["candidates"]) * x_BTD[:, :, None]).sum(-1)
        else:
            scores = x_BTD @ self.tables["item"](torch.arange(self.num_items, device=items_BT.device)).T
        return scores, x_BTD[torch.arange(len(x_BTD), device=x_BTD.device), batch["last"]]


def _with_dropout(block: Block, rate: float) -> Block:
    """Add dropout to the ends of both branches of a block."""
    if rate:
        block.attn.o = nn.Sequential(block.attn.o, nn.Dropout(rate))  # pyright: ignore[reportAttributeAccessIssue] - a module as before
        block.mlp = nn.Sequential(block.mlp, nn.Dropout(rate))
    return block
