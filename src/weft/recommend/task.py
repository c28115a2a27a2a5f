"""`task.name = "recommend"`: DLRM, DeepFM, two towers and SASRec on records with columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from weft.comm.mesh import Axis
from weft.config.plan import Plan
from weft.config.rules.rule import Facts
from weft.config.shapes.traced_model import Limit
from weft.data.table_data import SplitTables
from weft.recommend.metrics import evaluation_metrics, evaluation_scorer
from weft.recommend.networks import NetworkBuilder, loss_function
from weft.recommend.options import RecommendOptions
from weft.recommend.prepared import read_tables
from weft.recommend.record_batches import RecordBatches, RowNumber
from weft.train.folder import RunFolder
from weft.train.kept_tables import TableFile
from weft.train.tasks.base import EvaluationScorer, Report, Task, described
from weft.units import format_count

if TYPE_CHECKING:
    from weft.planner.search.model_source import PlannedModel

_ROWS = TableFile("rows.json", "rows")
_LIMITS = {name: Limit((1,), "recommenders support data parallelism only") for name in ("tp", "pp", "cp")}


class RecommendTask(RecommendOptions, Task):
    """Trains a recommender."""

    sections = ("data.train", "data.eval", "data.holdout", "data.max_record_bytes", "data.max_bad_fraction",
                "data.cache_dir")  # fmt: skip
    identity = ("data.holdout",)

    _batches: RecordBatches | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.metrics = evaluation_metrics(self)

    # --- preparing ---

    def facts(self, world_size: int) -> Facts:
        return Facts(world_size=world_size, global_batch=self.config.train.global_batch, limits=_LIMITS)

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Encode the records.

        Raises:
            DataError: if the data is invalid, or differs from the data that the folder's run was started with.
        """
        _ROWS.refuse_other(folder, self.read_tables(report))

    def read_tables(self, report: Report | None) -> SplitTables:
        """Return the encoded records, or the sequences of sasrec. They are made if the cache does not have them.

        Raises:
            DataError: if the data is invalid.
        """
        tables = read_tables(self.config.data, self, report)
        self._batches = RecordBatches(self, tables, self.config.seed)
        return tables

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        return _ROWS.text(self.tables, notes)

    def open(self, folder: RunFolder) -> None:
        self._batches = RecordBatches(self, _ROWS.read(folder), self.config.seed)

    @property
    def records(self) -> RecordBatches:
        """The prepared rows as batches. The first call reads the data, unless `prepare` or `open` was called."""
        if self._batches is None:
            self.read_tables(None)
        assert self._batches is not None
        return self._batches

    @property
    def tables(self) -> SplitTables:
        """The prepared rows."""
        return self.records.tables

    # --- samples and batches ---

    def samples(self, split: str) -> Sequence[Any] | None:
        return self.records.samples(split, self.config.train.global_batch)

    def samples_per_epoch(self) -> int:
        return len(self.tables.train)

    def collate(self, samples: list[RowNumber]) -> dict[str, Tensor]:
        return self.records.collate(samples)

    # --- the model ---

    @property
    def _network(self) -> NetworkBuilder:
        # Before the data is prepared, only names of modules matter.
        return NetworkBuilder(self, self._batches.num_rows if self._batches is not None else lambda name: 2)

    def build(self) -> nn.Module:
        return self._network.build(self.config.seed)

    def shapes(self) -> nn.Module:
        return self._network.shapes()

    def initial_model(self, plan: Plan) -> nn.Module:
        """Return the model. With several ranks it has no values: each rank makes its part of them from the seed."""
        _ = self.tables
        return self.shapes() if plan.world_size > 1 else self.build()

    def describe(self) -> PlannedModel:
        _ = self.tables
        return replace(super().describe(), task_limits=_LIMITS)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        found = super().forward(model, batch)
        return (*found, batch["item"], batch["log_q"]) if self.model == "two_tower" else found

    @property
    def loss(self) -> Callable[[Any, Any], tuple[Tensor, Tensor | int]]:  # pyright: ignore[reportIncompatibleMethodOverride] - a loss of the whole batch is an object
        return loss_function(self)

    # --- evaluation ---

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        if not self.is_pointwise:
            return {}
        return {"log_loss": sums["loss"] / sums["count"] if sums["count"] else None}

    def scorer(self, model: nn.Module, axis: Axis) -> EvaluationScorer:
        return evaluation_scorer(self, self.records, model, axis)

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
