"""Classification of texts and of tokens.

`task.name = "classify_text"` predicts a label or a number for each text or pair of texts, and
`task.name = "classify_tokens"` a label for each word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from weft.config.shapes.traced_model import Limit
from weft.data.table_data import Rows, TableRecord, label_fields, label_id, label_text, settled_labels
from weft.train.tasks.base import Metric
from weft.train.tasks.decoder_loss import token_cross_entropy
from weft.train.tasks.folder_task import IGNORED, FolderTask, padded

_CLASSES = (
    Metric("accuracy", "", "share of the texts whose label the model names"),
    Metric("macro_f1", "", "mean over the classes of the harmonic mean of precision and recall"),
)
_NUMBERS = (Metric("pearson", "", "correlation between the model's numbers and the data's"),)
#: Reason why sequence parallelism is unsupported.
NO_SP = Limit((0,), "the head reads one token of each text, which one rank alone would have")


@dataclass(eq=False)
class TextClassTask(FolderTask):
    """Sequence classification, and regression with one output.

    Attributes:
        text: name of the column with the text.
        pair: name of the column with a second text, or "".
        label: name of the column with the label: a name or an integer, or with `regression` a finite number.
        labels: comma-separated names of all classes; "" uses the classes of the model folder or of the training data.
        regression: if True, predict numbers, with the squared error as the loss.
        new_head: ignore the folder's head and initialize a new one.
        pad_multiple: padded text lengths are rounded up to a multiple of this.
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
        self.finalize({})

    def finalize(self, found: Mapping[str, Any]) -> None:
        self._names: list[str] = found.get("labels", [])
        self.sum_names = PAIR_SUMS if self.regression else class_sum_names(len(self._names))

    def limits(self) -> dict[str, Limit]:
        return {**super().limits(), "sp": NO_SP}

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        if self.regression:
            return {}
        seen = {label_text(one, one.value(self.label, "label"), self.label) for one in records}
        return settled_labels(self.labels, seen, self.network.labels(), new_head=self.new_head)

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
        batch = self.padded_inputs(samples, self.pad_id)
        labels = np.concatenate([one["label"] for one in samples])
        kind = torch.float32 if self.regression else torch.int64
        return {**batch, "labels": torch.from_numpy(labels).to(kind)}

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        labels, logits = batch["labels"], _wide(output)
        if not self.regression:
            return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()
        counts = labels.isfinite()
        apart = logits[:, 0] - labels.nan_to_num().to(logits.dtype)
        return (apart.square() * counts).sum(), counts.sum()

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        labels = batch["labels"]
        if not self.regression:
            return class_sums(output.argmax(-1), labels, len(self._names))
        counts = labels.isfinite()
        return pair_sums(output[counts, 0], labels[counts])

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        if self.regression:
            return {"pearson": correlation(sums, sums["count"])}
        number = len(self._names)
        return {"accuracy": accuracy(sums, number), "macro_f1": macro_f1(sums, number)}


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.itemsize == 8 else logits.float()


def _number(record: TableRecord, value: Any, column: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = np.nan
    if not np.isfinite(found) or isinstance(value, bool):
        record.refuse(f"column {column!r} holds {value!r}, and a number is needed. Leave the record out.")
    return found


# A label for each word of a text: `task.name = "classify_tokens"`. Only a word's first sub-token is counted.


@dataclass(eq=False)
class TokenClassTask(FolderTask):
    """Token classification: named entities, parts of speech.

    Attributes:
        words: name of the column with the words: a list of texts, or one text that is split at spaces.
        tags: name of the column with their labels, one per word.
        labels: comma-separated names of all classes; "" uses the classes of the model folder or of the training data.
        new_head: ignore the folder's head and initialize a new one.
        pad_multiple: padded text lengths are rounded up to a multiple of this.
    """

    words: str = "tokens"
    tags: str = "tags"
    labels: str = ""
    new_head: bool = False
    pad_multiple: int = 8

    unit, sample_unit = "words", "texts"
    head, head_words = "TokenClassification", "model for token classification"
    metrics = (
        Metric("accuracy", "", "share of words with the right label"),
        Metric("macro_f1", "", "mean over the labels of the harmonic mean of precision and recall, word by word"),
    )

    def __post_init__(self) -> None:
        self.finalize({})

    def finalize(self, found: Mapping[str, Any]) -> None:
        self._names: list[str] = found.get("labels", [])
        self.sum_names = class_sum_names(len(self._names))

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        seen: set[str] = set()
        for one in records:
            seen.update(label_text(one, tag, self.tags) for tag in _listed(one, self.tags, "tags"))
        return settled_labels(self.labels, seen, self.network.labels(), new_head=self.new_head)

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        words = [_listed(one, self.words, "words") for one in records]
        rows = self.encoded(words, None, is_split=True)
        for record, listed, row in zip(records, words, rows, strict=True):
            tags = _listed(record, self.tags, "tags")
            if len(tags) != len(listed):
                record.refuse(
                    f"it has {len(listed)} words in {self.words!r} and {len(tags)} labels in {self.tags!r}. "
                    "Give each word a label."
                )
            ids = [label_id(record, label_text(record, tag, self.tags), found["ids"]) for tag in tags]
            word_ids = row.pop("word_ids")
            first = np.diff(word_ids, prepend=-1) != 0
            labels = np.where((word_ids >= 0) & first, np.array(ids, np.int32)[word_ids], IGNORED)
            yield {**row, "labels": labels.astype(np.int32)}

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "labels": np.full_like(row["labels"], IGNORED)}

    def model_changes(self) -> Mapping[str, Any]:
        return label_fields(self._names) if self._names else {}

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        batch = self.padded_inputs(samples, self.pad_id)
        labels = padded([one["labels"] for one in samples], IGNORED, batch["input_ids"].shape[1])
        return {**batch, "labels": labels}

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return token_cross_entropy(output, batch)

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        return class_sums(output.argmax(-1), batch["labels"], len(self._names))

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        number = len(self._names)
        return {"accuracy": accuracy(sums, number), "macro_f1": macro_f1(sums, number)}


def _listed(record: TableRecord, column: str, option: str) -> list[Any]:
    """Return the list in a column. Text is parsed if it is a JSON list, and else split at spaces.

    Raises DataError if there is no list, or it is empty or has empty items.
    """
    found = record.value(column, option)
    if isinstance(found, str) and found.lstrip().startswith("["):  # a list in a file of comma-separated values
        try:
            found = json.loads(found)
        except ValueError:
            found = found.split()
    elif isinstance(found, str):
        found = found.split()
    if not isinstance(found, list) or not found or any(one is None or one == "" for one in found):
        record.refuse(f"column {column!r} has no list of words or labels, or an empty one. Leave the record out.")
    return found


# Counts that evaluations sum over batches and ranks, and the metrics computed from them: accuracy, F1, correlation.

_KINDS = ("hit", "said", "true")


def class_sum_names(num_classes: int) -> tuple[str, ...]:
    """Return the names of the results of `class_sums`."""
    return tuple(f"{kind}_{index}" for kind in _KINDS for index in range(num_classes))


def class_sums(said: torch.Tensor, labels: torch.Tensor, num_classes: int) -> dict[str, torch.Tensor]:
    """Count the samples of each class by correct prediction, by prediction and by label.

    The result has the names of `class_sum_names` and 0-d int64 tensors.

    Args:
        said: the predicted classes, int64.
        labels: int64, of the same shape; values below 0 are not counted.
        num_classes: number of classes.
    """
    counts = labels >= 0
    said, labels = said[counts], labels[counts]
    found = [torch.bincount(one, minlength=num_classes) for one in (labels[said == labels], said, labels)]
    names = class_sum_names(num_classes)
    return dict(zip(names, torch.cat(found), strict=True))


def accuracy(sums: Mapping[str, float], num_classes: int) -> float | None:
    """Return the share of correct predictions, or None if nothing was counted."""
    number = sum(sums[f"true_{index}"] for index in range(num_classes))
    return sum(sums[f"hit_{index}"] for index in range(num_classes)) / number if number else None


def macro_f1(sums: Mapping[str, float], num_classes: int) -> float | None:
    """Return the mean F1 of the classes that occur or are predicted, like scikit-learn's macro average.

    Return None without such classes.
    """
    each = [tuple(sums[f"{kind}_{index}"] for kind in _KINDS) for index in range(num_classes)]
    scores = [2 * hit / (said + true) for hit, said, true in each if said + true]
    return sum(scores) / len(scores) if scores else None


#: Names of the sums for predictions x and true values y.
PAIR_SUMS = ("x", "y", "xx", "yy", "xy")


def pair_sums(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the float64 sums from which `correlation` computes the correlation of two vectors of equal length."""
    x, y = x.double(), y.double()
    return dict(zip(PAIR_SUMS, (x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum()), strict=True))


def correlation(sums: Mapping[str, float], count: float) -> float | None:
    """Return Pearson's correlation, or None if one of the vectors is constant or `count` is 0.

    sums: totals of `pair_sums`. count: number of pairs.
    """
    if not count:
        return None
    x, y, xx, yy, xy = (sums[name] / count for name in PAIR_SUMS)
    spread = (xx - x * x) * (yy - y * y)
    return (xy - x * y) / math.sqrt(spread) if spread > 0 else None
