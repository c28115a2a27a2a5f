"""Base of tasks that train a Hugging Face model on rows of tables: padding, evaluation sets, files of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from weft.config.rules.rule import Facts
from weft.config.run_config import RunConfig
from weft.config.shapes.traced_model import Limit
from weft.data.table_data import Rows, SplitTables, TableReader, TableRecord
from weft.data.text.tokenizer_limits import bounded
from weft.errors import DataError
from weft.train.batches.batching_by_cost import cost_limits, costs_of
from weft.train.folder import RunFolder
from weft.train.kept_tables import TableFile
from weft.train.tasks.base import ModelTask, Report
from weft.train.tasks.folder_model import HeadedModel, own_pad

if TYPE_CHECKING:
    from weft.planner.search.model_source import PlannedModel


def padded_length(longest: int, multiple: int, most: int) -> int:
    """Return the padded length of a batch: `longest` rounded up to a multiple, but not beyond `most`.

    Args:
        longest: length of the longest row. The result is not shorter.
        multiple: lengths are rounded up to a multiple of this.
        most: maximum of the rounded length.
    """
    return max(longest, min(-(-longest // multiple) * multiple, most))


def padded(rows: Sequence[np.ndarray], value: int, length: int) -> torch.Tensor:
    """Return rows stacked and padded on the right: int64 (rows, length).

    Args:
        rows: integers, each 1-D.
        value: padding value.
        length: length of the result's rows.
    """
    found = torch.full((len(rows), length), value, dtype=torch.int64)
    for number, row in enumerate(rows):
        found[number, : len(row)] = torch.from_numpy(row.astype(np.int64))
    return found


class FilledUp(Sequence[Any]):
    """Samples, padded to full batches with samples that count in no loss or metric.

    Args:
        samples: at least one.
        multiple: the number of samples is rounded up to a multiple of this.
        blank: function that turns a sample into one that does not count.
    """

    def __init__(self, samples: Sequence[Any], multiple: int, blank: Callable[[Any], Any]):
        self._samples, self._blank = samples, blank
        self._length = -(-len(samples) // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        known = len(self._samples)
        return self._samples[index] if index < known else self._blank(self._samples[index % known])


def tokenised(tokenizer: Any, texts: Any, pairs: Any = None, **options: Any) -> Any:
    """Return the tokenizer's output for some texts, truncated to `max_length` tokens.

    Args:
        tokenizer: a transformers tokenizer.
        texts: texts, or lists of words.
        pairs: second texts, one per text; None for single texts.
        options: further arguments of the tokenizer, such as max_length.

    Raises:
        DataError: if the tokenizer takes too long, needs too much memory, or fails.
    """
    num_chars = sum(len(one) if isinstance(one, str) else sum(map(len, one)) for one in (*texts, *(pairs or ())))
    return bounded(lambda: tokenizer(texts, pairs, truncation=True, **options), num_chars)


#: Label that is ignored in the loss.
IGNORED = -100
_ROWS = TableFile("rows.json", "rows")
#: Reason why these tasks do not support context parallelism.
_NO_CP = Limit((1,), "context parallelism shards packed causal texts, and this task pads full texts")


def unit_column(config: RunConfig) -> str:
    """Return the column that a private run's units are the values of, or ""."""
    unit = config.privacy.unit
    return "" if not config.privacy.is_on or unit == "sample" else unit


def folder_limits(config: RunConfig) -> dict[str, Limit]:
    """Return limits of plan fields for tasks on padded texts."""
    return {"cp": _NO_CP, **cost_limits(config)}


class FolderTask(ModelTask):
    """Trains a Hugging Face model with a task head on rows of tables."""

    sections = ("model.path", "model.vocab_size", "tokenizer.add_tokens", "data.train", "data.eval", "data.holdout",
                "data.max_record_bytes", "data.max_bad_fraction", "data.cache_dir", "data.batching",
                "data.microbatch_cost", "train.seq_len")  # fmt: skip
    identity = ("model", "tokenizer.add_tokens", "data.holdout", "train.seq_len")

    #: Suffix of transformers' AutoModelFor class, and its name in messages.
    head: ClassVar[str]
    head_words: ClassVar[str]
    #: Options that do not affect the rows.
    free_options: ClassVar[tuple[str, ...]] = ("pad_multiple",)
    pad_multiple: int = 8
    #: True to ignore the folder's head and initialize a new one.
    new_head: bool = False
    #: Columns of a row that are padded.
    padded_columns: ClassVar[tuple[str, ...]] = ("input_ids",)

    _tables: SplitTables | None = None

    # --- defined by each task ---

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        """Make rows from consecutive records.

        found: result of `survey` on the training records, and "pad_id".
        """
        raise NotImplementedError

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        """Read all training records, and return JSON values that the rows depend on, such as class names."""
        return {}

    def finalize(self, found: Mapping[str, Any]) -> None:
        """Record the result of `survey`. Called before the model or a batch is built."""

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row with labels that are not counted, to pad the last batch of an evaluation."""
        raise NotImplementedError

    def model_changes(self) -> Mapping[str, Any]:
        """Return the fields of the model's config that the task sets."""
        return {}

    # --- preparing ---

    def facts(self, world_size: int) -> Facts:
        train = self.config.train
        return Facts(
            world_size=world_size, global_batch=train.global_batch, seq_len=train.seq_len, limits=self.limits()
        )  # fmt: skip

    def limits(self) -> dict[str, Limit]:
        """Return limits of plan fields for this task, in addition to its model's limits."""
        return folder_limits(self.config)

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Make rows from the data, and check the names and shapes of the weights.

        Raises:
            CheckpointError: if the weights cannot be read, or do not fit the model's config.
            ConfigError: if train.seq_len is more than the model supports, or token ids are outside its vocabulary.
            DataError: if the data is invalid, or differs from the data that the folder's run was started with, or if a
                text costs more than data.microbatch_cost.
        """
        self.network.check_length(self.config.train.seq_len)
        options = {key: value for key, value in self.config.task.options.items() if key not in self.free_options}
        key = [self.config.task.name, options, self.config.train.seq_len, self.network.tokenizer_digest()]
        rows = self.rows
        if unit := unit_column(self.config):
            key, rows = [*key, unit], self._rows_of_units
        tables = TableReader(self.config.data, key, rows, self._surveyed, report).tables()
        _ROWS.refuse_other(folder, tables)
        self._take(tables)
        costs_of(self, 1, 1)  # a text that no microbatch can hold
        self.network.check_weights(folder)

    def _rows_of_units(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        """Make rows with the column of privacy.unit, as a number for each text; empty for records without a value."""
        unit, rows = unit_column(self.config), list(self.rows(records, found))
        if len(rows) != len(records):
            raise DataError(f"privacy.unit={unit}: this task makes no row for each record. Use privacy.unit=sample.")
        for record, row in zip(records, rows, strict=True):
            value = record.values.get(unit)
            digest = hashlib.blake2b(str(value).encode(), digest_size=8).digest()
            is_empty = value is None or value == "" or value != value
            numbers = [] if is_empty else [int.from_bytes(digest, "little") >> 1]
            yield {unit: np.array(numbers, np.int64), **row}

    def _surveyed(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        """Return the result of `survey`, and the padding id of batches as "pad_id"."""
        tokenizer = self.network.tokenizer()
        rows = self.network.check_vocabulary(len(tokenizer))
        # Prefer the config's id: heads use it to find a text's last token, and RoBERTa to compute positions.
        own = own_pad(self.network.read_config(), rows)
        pads = (own, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return {"pad_id": next(one for one in pads if one is not None), **self.survey(records)}

    def _take(self, tables: SplitTables) -> None:
        self._tables = tables
        self.network.pad_id = tables.found.get("pad_id")
        self.finalize(tables.found)

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        """Copy the model folder's files except weights into the run folder, with the task's fields in config.json.

        Return the content of rows.json, by file name.
        """
        self.network.keep(folder)
        return _ROWS.text(self.tables, [*notes, *self.network.notes])

    def open(self, folder: RunFolder) -> None:
        self.network.open(folder)
        self._take(_ROWS.read(folder))

    @property
    def tables(self) -> SplitTables:
        """The rows, after `prepare` or `open`."""
        assert self._tables is not None
        return self._tables

    def encoded(self, texts: Any, pairs: Any = None, *, is_split: bool = False, **options: Any) -> Iterator[Any]:
        """Yield a row for each text, truncated to train.seq_len tokens.

        A row has `input_ids`, `is_cut` (1 if the text was truncated, else 0), and `token_type_ids` if the model reads
        them.

        Args:
            texts: texts, or lists of words.
            pairs: second texts, one per text; None for single texts.
            is_split: if True, texts are lists of words, and rows have `word_ids`, the word index of each token or -1.
            options: further arguments of the tokenizer.
        """
        tokenizer = self.network.tokenizer(**({"add_prefix_space": True} if is_split else {}))
        options |= {"max_length": self.config.train.seq_len, "is_split_into_words": is_split}
        found = tokenised(tokenizer, texts, pairs, **options)
        for one in found.encodings:
            row = {"input_ids": np.array(one.ids, np.int32), "is_cut": np.array([bool(one.overflowing)], np.uint8)}
            if "token_type_ids" in tokenizer.model_input_names:
                row["token_type_ids"] = np.array(one.type_ids, np.int8)
            if is_split:
                row["word_ids"] = np.array([-1 if word is None else word for word in one.word_ids], np.int64)
            yield row

    # --- batches ---

    def samples(self, split: str) -> Sequence[Any] | None:
        if split == "train":
            return self.tables.train
        table = self.tables.eval
        return None if table is None else FilledUp(table, self.config.train.global_batch, self.blank)

    def samples_per_epoch(self) -> int:
        return len(self.tables.train)

    def lengths(self) -> Sequence[int] | np.ndarray | None:
        """Return the length of each text, rounded up to `pad_multiple`: int64 (rows, padded columns)."""
        most, table = self.config.train.seq_len, self.tables.train
        columns = [table.lengths(name) for name in self.padded_columns]
        multiple = self.pad_multiple
        return np.stack([np.maximum(one, np.minimum(-(-one // multiple) * multiple, most)) for one in columns], axis=1)

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        costs = self.network.token_costs()
        return costs.work(lengths) / costs.work(1)

    def sample_lines(self, place: int) -> Sequence[str]:
        """Return the columns of a training row, and the text that the model reads."""
        from weft.data.order.loader import visible
        from weft.train.tasks.indexed import sample_in_order  # imported here, because it loads torch

        lines, (_, row) = super().sample_lines(place), sample_in_order(self.samples("train"), self.config.seed, place)
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return lines
        return [*lines, *visible(self.network.tokenizer().decode(row["input_ids"].tolist())).split("\n")]

    def padded_inputs(self, samples: Sequence[Mapping[str, np.ndarray]], pad_id: int) -> dict[str, torch.Tensor]:
        """Return ids, attention mask and token types, padded to one length.

        samples: rows with `input_ids`, and `token_type_ids` if the model reads them.
        """
        lengths = [len(one["input_ids"]) for one in samples]
        length = padded_length(max(lengths), self.pad_multiple, self.config.train.seq_len)
        batch = {"input_ids": padded([one["input_ids"] for one in samples], pad_id, length)}
        batch["attention_mask"] = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
        if "token_type_ids" in samples[0]:
            batch["token_type_ids"] = padded([one["token_type_ids"] for one in samples], 0, length)
        return batch

    @property
    def pad_id(self) -> int:
        """The padding id of texts, or 0 if it is unknown."""
        return self.network.pad_id or 0

    # --- model ---

    @cached_property
    def network(self) -> HeadedModel:
        """The folder's model with the task's head."""
        return HeadedModel(self.config, (self.head, self.head_words), self.model_changes, new_head=self.new_head)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return called(model, batch).logits

    def describe(self) -> PlannedModel:
        found = self.network.describe(self.config.train.seq_len, self.limits())
        return replace(found, config=self.config, sample_unit=self.sample_unit)

    def data_lines(self) -> Sequence[str]:
        return self.tables.summary


def called(model: nn.Module, batch: Mapping[str, Any], **options: Any) -> Any:
    """Return a transformers model's output for a batch without its labels.

    Args:
        model: a plain or sharded model.
        batch: tensors by the names of the model's inputs.
        options: further arguments of forward.
    """
    return model(**{name: value for name, value in batch.items() if name != "labels"}, **options)
