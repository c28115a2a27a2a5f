"""`task.name = "recommend"`: DLRM, DeepFM, two towers and SASRec on records with columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.comm.mesh import Axis
from weft.config.plan import Plan
from weft.config.rules.rule import Facts
from weft.config.shapes.traced_model import Limit
from weft.data.order.stream import derive_key
from weft.data.store.row_table import RowTable
from weft.data.table_data import SplitTables
from weft.errors import ConfigError, DataError, Problem, did_you_mean
from weft.models.initialize import initialise
from weft.models.recommenders import DeepFm, Dlrm, FeatureTower, IdField, SasRec, TwoTower
from weft.recommend.columns import RecordColumn, parse_columns
from weft.recommend.metrics import AreaUnderCurve, ItemRanks, RankedItems
from weft.recommend.prepared import (
    SPLITS,
    ColumnReader,
    ColumnSchema,
    RecommendReader,
    item_catalog,
    item_sequences,
)
from weft.train.folder import RunFolder, free_name
from weft.train.losses import GlobalBatchLoss
from weft.train.tasks.base import EvaluationScorer, Metric, Report, Task, described
from weft.train.tasks.folder_task import IGNORED, FilledUp
from weft.units import format_count

if TYPE_CHECKING:
    from weft.planner.search.model_source import PlannedModel

POINTWISE = ("dlrm", "deepfm")
MODELS = (*POINTWISE, "two_tower", "sasrec")
_ROWS = "rows.json"
_LIMITS = {name: Limit((1,), "recommenders support data parallelism only") for name in ("tp", "pp", "cp")}


@dataclass(slots=True)
class RowNumber:
    """A sample: the number of a row of a split, which `collate` reads together with the others of the batch.

    epoch: of training. index: -1 for padding of the last evaluation batch.
    """

    split: str
    epoch: int
    index: int


class RowNumbers(Sequence[RowNumber]):
    """The rows of a split by number."""

    def __init__(self, split: str, num_rows: int):
        self._split, self._num_rows = split, num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._num_rows:
            raise IndexError(index)
        return RowNumber(self._split, 0, index)

    def in_epoch(self, epoch: int, index: int) -> RowNumber:
        """Return a row in an epoch, on which its negative items depend."""
        return RowNumber(self._split, epoch, index)


@dataclass(eq=False)
class RecommendTask(Task):
    """Trains a recommender.

    Attributes:
        columns: the columns that the model reads, such as ["user=id", "item=id", "rating=label>=4"].
        model: dlrm, deepfm, two_tower or sasrec.
        split: records that are held out: random (a share, by a hash of the content), time (the latest share), or last
            (each user's last item, only for sasrec). "" for random, and last for sasrec.
        user, item: columns of the user and of the item for two_tower and sasrec. The first one is the id.
        dim: width of embeddings.
        hidden: hidden widths of the MLPs.
        dropout: rate of dropout.
        temperature: divides the cosines of two_tower.
        corrects: subtract the logarithm of an item's frequency from the scores of two_tower.
        length: longest sequence of sasrec.
        layers, heads: blocks and attention heads of sasrec.
        negatives: negative items for each position of sasrec; 0 compares with all items.
        k: values of k of recall@k and NDCG@k.
    """

    columns: tuple[str, ...]
    model: str = "deepfm"
    split: str = ""
    user: tuple[str, ...] = ()
    item: tuple[str, ...] = ()
    dim: int = 16
    hidden: tuple[float, ...] = (64, 32)
    dropout: float = 0.0
    temperature: float = 0.1
    corrects: bool = True
    length: int = 50
    layers: int = 2
    heads: int = 2
    negatives: int = 0
    k: tuple[float, ...] = (10,)

    sections = ("data.train", "data.eval", "data.holdout", "data.max_record_bytes", "data.max_bad_fraction",
                "data.cache_dir")  # fmt: skip
    identity = ("data.holdout",)

    _tables: SplitTables | None = None
    _catalog: RowTable | None = None

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            hint = did_you_mean(self.model, MODELS) or f" Use {', '.join(MODELS)}."
            raise _refused("model", self.model, f"there is no such model.{hint}")
        self.split = self.split or ("last" if self.model == "sasrec" else "random")
        if self.split not in SPLITS or (self.split == "last") != (self.model == "sasrec"):
            right = "last" if self.model == "sasrec" else "random or time"
            raise _refused("split", self.split, f"{self.model} is evaluated on split={right}. Use that.")
        self.schema = ColumnSchema(parse_columns(_listed(self.columns)), _listed(self.user), _listed(self.item))
        _check_numbers(self)
        _check_columns(self)
        ks = [round(one) for one in self.k]
        self.metrics = (
            (
                Metric("auc", "", "area under the ROC curve over all samples of the evaluation"),
                Metric("log_loss", "", "mean negative log-likelihood of the labels, in nats"),
            )
            if self.model in POINTWISE
            else tuple(
                metric
                for k in ks
                for metric in (
                    Metric(f"recall_at_{k}", "", f"share of samples whose item is among the {k} best of all items"),
                    Metric(f"ndcg_at_{k}", "", f"mean of 1 / log2(1 + rank) of the item, 0 beyond rank {k}"),
                )
            )
        )

    # --- preparing ---

    def facts(self, world_size: int) -> Facts:
        return Facts(world_size=world_size, global_batch=self.config.train.global_batch, limits=_LIMITS)

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Encode the records.

        Raises:
            DataError: if the data is invalid, or differs from the data that the folder's run was started with.
        """
        tables = self.read_tables(report)
        begun = SplitTables.from_json(folder.text(_ROWS)) if (folder.path / _ROWS).is_file() else tables
        if begun.digests != tables.digests:
            raise DataError(
                f"data: the rows are not those that the run in {str(folder.path)!r} was started with. Use "
                f"{free_name(folder)} for a new run, or bring the old data back to resume."
            )

    def read_tables(self, report: Report | None) -> SplitTables:
        """Return the encoded records, or the sequences of sasrec. They are made if the cache does not have them.

        Raises:
            DataError: if the data is invalid.
        """
        if self.split == "last" and self.config.data.eval:
            raise DataError(
                "data.eval: split=last evaluates on the last item of each user of data.train. Leave it out."
            )
        data, is_paired = self.config.data, self.model not in POINTWISE
        found = RecommendReader(data, self.schema, self.split, is_paired, report).tables()
        if self.model == "sasrec":
            found = item_sequences(data, found, self.schema, self.length)
        elif self.model == "two_tower":
            catalog = item_catalog(data, found, self.schema)
            found = replace(found, found={**found.found, "catalog": str(catalog.folder)})
        self._tables = found
        return found

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        return {_ROWS: replace(self.tables, summary=(*self.tables.summary, *notes)).to_json()}

    def open(self, folder: RunFolder) -> None:
        self._tables = SplitTables.from_json(folder.text(_ROWS))

    @property
    def tables(self) -> SplitTables:
        """The prepared rows. The first call reads the data, unless `prepare` or `open` was called."""
        return self._tables if self._tables is not None else self.read_tables(None)

    @property
    def catalog(self) -> RowTable:
        """The last training record and the number of records of each item."""
        if self._catalog is None:
            self._catalog = RowTable(Path(self.tables.found["catalog"]))
        return self._catalog

    # --- samples and batches ---

    def samples(self, split: str) -> Sequence[Any] | None:
        if split == "train":
            return RowNumbers(split, len(self.tables.train))
        table = self.tables.eval
        if table is None:
            return None
        rows = RowNumbers(split, len(table))
        return FilledUp(rows, self.config.train.global_batch, lambda row: replace(row, index=-1))

    def samples_per_epoch(self) -> int:
        return len(self.tables.train)

    def collate(self, samples: list[RowNumber]) -> dict[str, Tensor]:
        table = self.tables.train if samples[0].split == "train" else self.tables.eval
        assert table is not None
        if self.model == "sasrec":
            return self._sequences(samples, table)
        index = np.array([row.index for row in samples])
        found = self._reader.read(table, index.clip(0))
        if self.model in POINTWISE:
            found["labels"] = np.where(index < 0, np.nan, table.column("label")[index.clip(0)]).astype(np.float32)
        else:
            item = found["ids"][:, self._item_index]
            found["item"] = np.where(index < 0, -1, item)
            found["log_q"] = self._log_frequencies[item].astype(np.float32)
        return {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in found.items()}

    @cached_property
    def _reader(self) -> ColumnReader:
        return ColumnReader(self.schema, self.tables.found["numbers"])

    @cached_property
    def _item_index(self) -> int:
        return self.schema.ids.index(self.schema.named(self.schema.item[0]))

    @cached_property
    def _log_frequencies(self) -> np.ndarray:
        """Logarithm of each item's share of the training records, float64 (items + 1,)."""
        counts = np.concatenate(([self.catalog.notes["num_unknown"]], self.catalog.column("count")))
        return np.log(np.maximum(counts, 1) / counts.sum()) if self.corrects else np.zeros(len(counts))

    def _sequences(self, samples: list[RowNumber], table: RowTable) -> dict[str, Tensor]:
        rows = [table[max(0, one.index)] for one in samples]
        inputs = [row["items"] if "target" in row else row["items"][:-1] for row in rows]
        items = np.zeros((len(rows), max(map(len, inputs))), np.int64)
        labels = np.full_like(items, IGNORED)
        targets = np.full(len(rows), -1)
        for number, (sample, row, own) in enumerate(zip(samples, rows, inputs, strict=True)):
            items[number, : len(own)] = own
            if sample.index < 0:
                continue
            if "target" in row:
                labels[number, len(own) - 1] = targets[number] = row["target"][0]
            else:
                labels[number, : len(own)] = row["items"][1:]
        found = {
            "items": items,
            "last": np.array([len(one) - 1 for one in inputs]),
            "labels": labels,
            "target": targets,
        }
        if self.negatives:
            found["candidates"] = self._candidates(samples, labels)
        return {name: torch.from_numpy(one) for name, one in found.items()}

    def _candidates(self, samples: list[RowNumber], labels: np.ndarray) -> np.ndarray:
        """Return each position's right item, then random other ones, which depend on (seed, epoch, row, position)."""
        number = self._num_rows(self.schema.item[0])
        found = np.zeros((*labels.shape, 1 + self.negatives), np.int64)
        found[..., 0] = right = np.maximum(labels, 0)
        for row, sample in enumerate(samples):
            key = derive_key("negatives", self.config.seed, sample.split, sample.epoch, sample.index)
            drawn = np.random.Generator(np.random.Philox(key=key)).integers(
                1, max(2, number - 1), found[row, :, 1:].shape
            )
            others = (drawn + (drawn >= right[row, :, None])).clip(1, number - 1)
            found[row, :, 1:] = others * (right[row, :, None] > 0)  # positions without an item have padding only
        return found

    # --- the model ---

    def build(self) -> nn.Module:
        model = self.shapes()
        if torch.get_default_device().type == "meta":
            return model
        model.to_empty(device="cpu")
        initialise(model, self.config.seed)
        return model

    def shapes(self) -> nn.Module:
        with torch.device("meta"):
            return self._network()

    def initial_model(self, plan: Plan) -> nn.Module:
        """Return the model. With several ranks it has no values: each rank makes its part of them from the seed."""
        _ = self.tables
        return self.shapes() if plan.world_size > 1 else self.build()

    def _network(self) -> nn.Module:
        hidden = [round(one) for one in self.hidden]
        if self.model == "sasrec":
            rows = self._num_rows(self.schema.item[0])
            return SasRec(rows, self.length, self.dim, self.layers, self.heads, self.dropout)
        if self.model == "two_tower":
            towers = [self._tower(names, hidden) for names in (self.schema.user, self.schema.item)]
            return TwoTower(*towers)
        kind = Dlrm if self.model == "dlrm" else DeepFm
        fields = [self._field(one) for one in self.schema.columns if one.has_ids]
        return kind(fields, len(self.schema.numbers), self.dim, hidden, self.dropout)

    def _tower(self, names: Sequence[str], hidden: list[int]) -> FeatureTower:
        columns = [self.schema.named(name) for name in names]
        numbers = [self.schema.numbers.index(one) for one in columns if one.kind == "number"]
        return FeatureTower(
            [self._field(one) for one in columns if one.has_ids], numbers, self.dim, hidden, self.dropout
        )

    def _field(self, column: RecordColumn) -> IdField:
        index = self.schema.ids.index(column) if column.kind == "id" else None
        return IdField(column.module, self._num_rows(column.name), index, column.padding)

    def _num_rows(self, name: str) -> int:
        """Return the rows of a column's table: 2 before the data is prepared, when only names of modules matter."""
        return self._tables.found["rows"][name] if self._tables is not None else 2

    def describe(self) -> PlannedModel:
        _ = self.tables
        return replace(super().describe(), task_limits=_LIMITS)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        found = super().forward(model, batch)
        return (*found, batch["item"], batch["log_q"]) if self.model == "two_tower" else found

    @property
    def loss(self) -> Callable[[Any, Any], tuple[Tensor, Tensor | int]]:  # pyright: ignore[reportIncompatibleMethodOverride] - a loss of the whole batch is an object
        if self.model == "two_tower":
            return GlobalBatchLoss(self._compare)
        return self._next_items if self.model == "sasrec" else _log_loss

    def _compare(self, own: Any, every: Any, places: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return the sum of the sampled softmax losses of some samples, whose negatives are all other items.

        An item of the batch is left out as a negative of a sample with the same item.
        """
        (users, _, own_item, _), (_, vectors, item, log_q) = own, every
        scores = users @ vectors.T / self.temperature - log_q
        is_own = places[:, None] == torch.arange(len(item), device=item.device)
        is_left_out = ((own_item[:, None] == item) | (item < 0)) & ~is_own
        losses = F.cross_entropy(scores.masked_fill(is_left_out, -torch.inf), places, reduction="none")
        counts = own_item >= 0
        return (losses * counts).sum(), counts.sum()

    def _next_items(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        scores, labels = _wide(output[0]), batch["labels"]
        counts = labels != IGNORED
        if "candidates" in batch:
            labels = torch.where(counts, 0, IGNORED)
        else:  # row 0 is padding
            scores = scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) == 0, -torch.inf)
        losses = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return losses, counts.sum()

    # --- evaluation ---

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        if self.model not in POINTWISE:
            return {}
        return {"log_loss": sums["loss"] / sums["count"] if sums["count"] else None}

    def scorer(self, model: nn.Module, axis: Axis) -> EvaluationScorer:
        if self.model in POINTWISE:
            return AreaUnderCurve(axis)
        device = next(model.parameters()).device

        def vectors(ids: Tensor) -> Tensor:
            found = {"ids": ids}
            if self.model == "two_tower":
                rows = self.catalog.column("row")[ids.numpy() - 1]
                found = {
                    name: torch.from_numpy(one) for name, one in self._reader.read(self.tables.train, rows).items()
                }
            return model(of_items=True, **{name: one.to(device) for name, one in found.items()})[1]

        number = self._num_rows(self.schema.item[0]) - 1
        ranks = ItemRanks(vectors, number, [round(one) for one in self.k], axis)
        if self.model == "sasrec":
            return RankedItems(ranks, lambda output, batch: (output[1], batch["target"]))
        return RankedItems(ranks, lambda output, batch: (output[0], batch["item"]))

    # --- text for users ---

    def name(self) -> str:
        return self.model

    def model_line(self) -> str:
        model = self.shapes()
        rows = sum(one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
        number = sum(param.numel() for param in model.parameters())
        return f"{self.model}: {format_count(number)} parameters, tables of {format_count(rows)} rows"

    def data_lines(self) -> Sequence[str]:
        return self.tables.summary

    def sample_lines(self, place: int) -> Sequence[str]:
        from weft.train.tasks import indexed

        where, row = indexed.sample_in_order(self.samples("train"), self.config.seed, place)
        return [where, *described(self.collate([row]))]


def _log_loss(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of the binary cross-entropies of logits, and their number. Labels that are NaN are not counted."""
    labels, logits = batch["labels"], _wide(output)
    counts = labels.isfinite()
    losses = F.binary_cross_entropy_with_logits(logits, labels.nan_to_num().to(logits.dtype), reduction="none")
    return (losses * counts).sum(), counts.sum()


def _wide(values: Tensor) -> Tensor:
    return values if values.itemsize == 8 else values.float()


def _listed(names: Any) -> tuple[str, ...]:
    """Return an option as a tuple: a list of texts, or one text with commas."""
    return tuple(one.strip() for one in names.split(",") if one.strip()) if isinstance(names, str) else tuple(names)


# Checks of the options.


def _refused(option: str, value: object, rule: str) -> ConfigError:
    return ConfigError([Problem(f"task.options.{option}", f"task.options.{option}={value}: {rule}")])


def _check_numbers(task: RecommendTask) -> None:
    ranges = {"dim": (1, 2**16), "dropout": (0.0, 0.99), "length": (2, 2**16), "negatives": (0, 2**16)}
    for name, (least, most) in ranges.items():
        if not least <= getattr(task, name) <= most:
            raise _refused(name, getattr(task, name), f"it is {least:g} to {most:g}. Use a number between.")
    if task.temperature <= 0:
        raise _refused("temperature", task.temperature, "a temperature is above 0. Use 0.1.")
    for name in ("hidden", "k"):
        value = getattr(task, name)
        if not isinstance(value, tuple | list) or any(
            isinstance(one, str) or one < 1 or one != round(one) for one in value
        ):
            raise _refused(name, value, "it is a list of whole numbers from 1. Write e.g. [64, 32].")
    if not task.k:
        raise _refused("k", "[]", "at least one value of k is needed. Write e.g. [10].")


def _check_columns(task: RecommendTask) -> None:
    schema, model = task.schema, task.model
    for kind in ("label", "time"):
        if len(schema.of_kind(kind)) > 1:
            raise _refused(
                "columns", ", ".join(_listed(task.columns)), f"there are two columns of kind {kind}. Keep one."
            )
    if task.split != "random" and schema.time is None:
        raise _refused("split", task.split, "it needs the time of records. Add a column such as timestamp=time.")
    if model in POINTWISE:
        if schema.label is None:
            raise _refused(
                "columns",
                ", ".join(_listed(task.columns)),
                f"{model} needs a label. Add a column such as rating=label>=4.",
            )
        if not any(one.has_ids for one in schema.columns):
            raise _refused(
                "columns", ", ".join(_listed(task.columns)), f"{model} needs a column of ids. Add one such as item=id."
            )
        for name in ("user", "item"):
            if value := getattr(schema, name):
                raise _refused(name, ",".join(value), f"{model} reads all columns together. Leave it out.")
        return
    for name in ("user", "item"):
        columns = [schema.named(one) for one in getattr(schema, name)]
        if not columns:
            raise _refused(name, "", f'{model} needs the columns of the {name}. Write e.g. {name}=["{name}_id"].')
        if columns[0].kind != "id" or not columns[0].learns:
            text = f"{columns[0].name}={columns[0].kind}"
            rule = f"the first column is the {name}'s id, with a learned vocabulary, and not {text}."
            raise _refused(name, columns[0].name, f"{rule} Write {columns[0].name}=id in columns.")
    _check_roles(task)


def _check_roles(task: RecommendTask) -> None:
    """Check that each column belongs to the user or the item, and that sasrec has the ids only."""
    schema = task.schema
    both = set(schema.user) & set(schema.item)
    if both:
        raise _refused(
            "item", ",".join(schema.item), f"the column {min(both)!r} is also one of the user. Name it once."
        )
    roles = {*schema.user, *schema.item}
    for one in schema.columns:
        if one.kind not in ("label", "time") and one.name not in roles:
            raise _refused(
                "columns", one.name, "the column is neither in user nor in item. Name it in one, or leave it out."
            )
    if task.model == "sasrec" and (more := [*schema.user[1:], *schema.item[1:]]):
        raise _refused("columns", more[0], "sasrec reads the ids of users and items only. Leave it out.")
