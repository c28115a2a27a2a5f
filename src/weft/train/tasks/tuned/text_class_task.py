"""A label or a number for each text, or pair of texts: `task.name = "classify_text"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.spec.traced import Limit
from weft.train.task import Metric
from weft.train.tasks.tuned import class_counts
from weft.train.tasks.tuned.folder_task import IGNORED, FolderTask
from weft.train.tasks.tuned.label_names import label_fields, label_id, label_text, settled_labels
from weft.train.tasks.tuned.table_data import Rows, TableRecord

if TYPE_CHECKING:
    import torch

_CLASSES = (
    Metric("accuracy", "", "share of the texts whose label the model names"),
    Metric("macro_f1", "", "mean over the classes of the harmonic mean of precision and recall"),
)
_NUMBERS = (Metric("pearson", "", "correlation of the model's numbers with those of the data"),)
#: Why tokens are not divided between layers.
_NO_SP = Limit((0,), "the head reads one token of each text, which one rank alone would have")


@dataclass(eq=False)
class TextClassTask(FolderTask):
    """Sequence classification, and regression with one output.

    text: column of the text.
    pair: column of the second text; "": there is none.
    label: column of the label: a name or a whole number, or with `regression` any number.
    labels: names of all classes, joined by commas; "": the folder's, or those of the training data.
    regression: whether numbers are learnt, by the squared error.
    new_head: leave out a head that the folder has, and start a new one.
    pad_multiple: what the length of a batch's texts is rounded up to.
    """

    text: str = "text"
    pair: str = ""
    label: str = "label"
    labels: str = ""
    regression: bool = False
    new_head: bool = False
    pad_multiple: int = 8

    unit = sample_unit = "texts"
    head, head_words = "SequenceClassification", "model for sequence classification"

    def __post_init__(self) -> None:
        self.metrics = _NUMBERS if self.regression else _CLASSES
        self.settle({})

    def settle(self, found: Mapping[str, Any]) -> None:
        self._names: list[str] = found.get("labels", [])
        self.sum_names = class_counts.PAIR_SUMS if self.regression else class_counts.class_sum_names(len(self._names))

    def limits(self) -> dict[str, Limit]:
        return {**super().limits(), "sp": _NO_SP}

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        if self.regression:
            return {}
        seen = {label_text(one, one.value(self.label, "label"), self.label) for one in records}
        return settled_labels(self.labels, seen, self.own_labels(), new_head=self.new_head)

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        texts = [one.text(self.text, "text") for one in records]
        pairs = [one.text(self.pair, "pair") for one in records] if self.pair else None
        for record, row in zip(records, self.encoded(texts, pairs), strict=True):
            value = record.value(self.label, "label")
            label = (
                np.array([_number(record, value, self.label)], np.float32)
                if self.regression
                else np.array([label_id(record, label_text(record, value, self.label), found["ids"])], np.int32)
            )
            yield {**row, "label": label}

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "label": np.array([np.nan] if self.regression else [IGNORED])}

    def model_changes(self) -> Mapping[str, Any]:
        if self.regression:
            return {**label_fields(["value"]), "problem_type": "regression"}
        return {**label_fields(self._names), "problem_type": "single_label_classification"} if self._names else {}

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        import torch

        batch = self.padded_inputs(samples, self.pad_id)
        labels = np.concatenate([one["label"] for one in samples])
        kind = torch.float32 if self.regression else torch.int64
        return {**batch, "labels": torch.from_numpy(labels).to(kind)}

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.nn import functional as F

        labels, logits = batch["labels"], _wide(output)
        if not self.regression:
            return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()
        counts = labels.isfinite()
        apart = logits[:, 0] - labels.nan_to_num().to(logits.dtype)
        return (apart.square() * counts).sum(), counts.sum()

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        labels = batch["labels"]
        if not self.regression:
            return class_counts.class_sums(output.argmax(-1), labels, len(self._names))
        counts = labels.isfinite()
        return class_counts.pair_sums(output[counts, 0], labels[counts])

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        if self.regression:
            return {"pearson": class_counts.correlation(sums, sums["count"])}
        number = len(self._names)
        return {"accuracy": class_counts.accuracy(sums, number), "macro_f1": class_counts.macro_f1(sums, number)}


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """The logits in a format that losses are summed in."""
    return logits if logits.itemsize == 8 else logits.float()


def _number(record: TableRecord, value: Any, column: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = np.nan
    if not np.isfinite(found) or isinstance(value, bool):
        record.refuse(f"column {column!r} holds {value!r}, and a number belongs there. Leave the record out.")
    return found
