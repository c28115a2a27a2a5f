"""Texts as vectors, near where they belong together: `task.name = "embed"`.

The loss is InfoNCE with the other pairs of the global batch as negatives (van den Oord et al. 2018, arXiv 1807.03748).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from weft.errors import ConfigError, Problem
from weft.spec.traced import Limit
from weft.train.task import Metric, Task
from weft.train.tasks.tuned.folder_task import FolderTask
from weft.train.tasks.tuned.table_data import Rows, TableRecord

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.planner.search import PlannedModel
    from weft.train.step import WholeBatchLoss

Pooling = Literal["mean", "cls", "last"]
_NO_PP = Limit(
    (1,), "the loss compares all texts of the global batch, and a pipeline goes backward before they are there"
)


@dataclass(eq=False)
class EmbedTask(FolderTask):
    """An embedding model, trained on pairs that belong together.

    query: column of the first text.
    positive: column of the text that belongs to it.
    negative: column of a text that does not; "": there is none.
    pooling: how a text's vector comes from its tokens' (mean, cls: the first, last).
    normalise: whether vectors have length 1.
    temperature: what the products of vectors are divided by.
    pad_multiple: what the length of a batch's texts is rounded up to.
    """

    query: str = "query"
    positive: str = "positive"
    negative: str = ""
    pooling: str = "mean"
    normalise: bool = True
    temperature: float = 0.05
    pad_multiple: int = 8

    unit = sample_unit = "pairs"
    head, head_words = "", "model"
    free_options = ("pad_multiple", "pooling", "normalise", "temperature")
    sum_names = ("within_1", "within_10")
    metrics = (
        Metric("recall_at_1", "", "share of the queries whose own text is the nearest of the evaluation set"),
        Metric("recall_at_10", "", "share of the queries whose own text is among the nearest ten"),
    )

    #: None are said: the loss compares all texts of a batch, in their order.
    lengths = Task.lengths

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            rule = f"not one of {', '.join(get_args(Pooling))}. Use mean."
            raise ConfigError([Problem("task.options.pooling", f"task.options.pooling={self.pooling}: {rule}")])
        if self.temperature <= 0:
            rule = "a temperature is above 0. Use 0.05."
            key = "task.options.temperature"
            raise ConfigError([Problem(key, f"{key}={self.temperature:g}: {rule}")])

    def limits(self) -> dict[str, Limit]:
        return {**super().limits(), "pp": _NO_PP}

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        from weft.structure import hugging_face

        config: Any = hugging_face.load_model_config(self._base)
        if getattr(config, "is_encoder_decoder", False):
            rule = "it is an encoder with a decoder, and embed takes one of them. Give the folder of an encoder."
            raise ConfigError([Problem("model.path", f"model.path={self.config.model.path}: {rule}")])
        return {}

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        options = {"query": self.query, "positive": self.positive}
        options |= {"negative": self.negative} if self.negative else {}
        columns = {
            option: list(self.encoded([one.text(column, option) for one in records]))
            for option, column in options.items()
        }
        for number in range(len(records)):
            texts = {option: rows[number] for option, rows in columns.items()}
            row = {f"{name}.{option}": one[name] for option, one in texts.items() for name in one if name != "is_cut"}
            yield {**row, "is_cut": np.max([one["is_cut"] for one in texts.values()], axis=0)}

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "is_blank": np.ones(1, np.uint8)}

    def collate(self, samples: Sequence[_Pair]) -> dict[str, torch.Tensor]:
        """Lay the texts of a pair one below the other, pair by pair."""
        import torch

        rows = [one.row for one in samples]
        options = [name.partition(".")[2] for name in rows[0] if name.startswith("input_ids.")]
        names = {name.partition(".")[0] for name in rows[0] if "." in name}
        texts = [{name: one[f"{name}.{option}"] for name in names} for one in rows for option in options]
        counted = torch.tensor([0 if "is_blank" in one else 1 for one in rows])
        return {**self.padded_inputs(texts, self.pad_id), "is_counted": counted}

    def samples(self, split: str) -> Sequence[Any] | None:
        found = super().samples(split)
        return None if found is None else _Pairs(found)

    # --- planner ---

    def describe(self) -> PlannedModel:
        """Describe the model, of which a pair takes two or three texts."""
        return replace(super().describe(), texts=3 if self.negative else 2)

    # --- model and step ---

    def build(self) -> nn.Module:
        model = super().build()
        for name, param in model.named_parameters():
            if "pooler." in name:  # nothing calls it, and weight decay would wear it away
                param.requires_grad_(False)
        return model

    def forward(self, model: Any, batch: Any) -> Any:
        """Return the vectors of queries, of their texts, of negatives, and which pairs count."""
        from torch.nn import functional as F

        inputs = {name: value for name, value in batch.items() if name != "is_counted"}
        states, mask = self.called(model, inputs).last_hidden_state, batch["attention_mask"]
        if self.pooling == "cls":
            pooled = states[:, 0]
        elif self.pooling == "last":
            last = mask.sum(1) - 1
            pooled = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1]))[:, 0]
        else:
            weights = mask[..., None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)
        wide = pooled if pooled.itemsize == 8 else pooled.float()
        vectors = F.normalize(wide, dim=-1) if self.normalise else wide
        counted = batch["is_counted"]
        each = vectors.unflatten(0, (len(counted), -1))
        return (*each.unbind(1), counted)

    @property
    def loss(self) -> WholeBatchLoss:  # pyright: ignore[reportIncompatibleMethodOverride] - a loss of the whole batch is an object
        from weft.train.step import WholeBatchLoss

        return WholeBatchLoss(self._compare, self._score)

    def _compare(self, own: Any, every: Any, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """InfoNCE of some queries: their own text among all texts and all negatives of the batch."""
        import torch
        from torch.nn import functional as F

        texts, counted = torch.cat(every[1:-1]), every[-1].repeat(len(every) - 2)
        products = own[0] @ texts.T / self.temperature
        products = products.masked_fill(counted == 0, -torch.inf)
        is_own = own[-1] != 0
        losses = F.cross_entropy(products[is_own], places[is_own], reduction="sum")
        return losses, is_own.sum()

    def _score(self, own: Any, every: Any, places: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Of how many queries at most 0 or 9 texts of the set are nearer than their own."""
        import torch

        products = (own[0] @ every[1].T).masked_fill(every[-1] == 0, -torch.inf)
        mine = products.gather(1, places[:, None])
        nearer, is_own = (products > mine).sum(1), own[-1] != 0
        return {"within_1": ((nearer < 1) & is_own).sum(), "within_10": ((nearer < 10) & is_own).sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        count = sums["count"]
        return {f"recall_at_{most}": sums[f"within_{most}"] / count if count else None for most in (1, 10)}


@dataclass(frozen=True, slots=True)
class _Pair:
    """A row, closed: dropout counts as many rows of a batch for each pair, whatever the lengths of its texts."""

    row: Mapping[str, np.ndarray]


class _Pairs(Sequence[_Pair]):
    """Rows as pairs."""

    def __init__(self, rows: Sequence[Mapping[str, np.ndarray]]):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return _Pair(self._rows[index])
