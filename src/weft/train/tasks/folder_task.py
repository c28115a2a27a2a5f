"""Base of tasks on a Hugging Face folder: padded rows, padded evaluation sets, weights with a new head, run files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from weft.checkpoint.pretrained import JoinedTensors
from weft.checkpoint.read import Part
from weft.checkpoint.safetensors_files import torch_formats
from weft.config.rules.rule import Facts
from weft.config.traced_model import Limit
from weft.errors import ConfigError, DataError, Problem
from weft.files import COMPANIONS, read_regular
from weft.models.initialize import initialise_parameter
from weft.parallel.state.flat_slices import originals_of
from weft.train.batching_by_cost import TokenCosts, cost_limits, costs_of
from weft.train.folder import RunFolder, free_name, run_folder
from weft.train.tasks.base import Report, Task
from weft.train.tasks.table_data import Rows, SplitTables, TableReader, TableRecord
from weft.train.weights.decoder_files import base_of, keep_base
from weft.train.weights.published_weights import pretrained_source
from weft.units import format_count

if TYPE_CHECKING:
    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel


def padded_length(longest: int, multiple: int, most: int) -> int:
    """Return the padded length of a batch's rows.

    Args:
        longest: length of the longest row.
        multiple: lengths are rounded up to a multiple of it.
        most: maximum length.
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
    """Samples, padded to full batches with samples that are not counted.

    Args:
        samples: at least one.
        multiple: the number of samples is rounded up to a multiple of it.
        blank: turns a sample into one that is not counted.
    """

    def __init__(self, samples: Sequence[Any], multiple: int, blank: Callable[[Any], Any]):
        self._samples, self._blank = samples, blank
        self._length = -(-len(samples) // multiple) * multiple

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        known = len(self._samples)
        return self._samples[index] if index < known else self._blank(self._samples[index % known])


# The weights of a pretrained folder, with a new head if the folder lacks one. The head's values depend only on
# (seed, name).

#: Standard deviation of `initialise_parameter`.
_USUAL_STD = 0.02


def source_with_head(
    model: Any, folder: Path, seed: int, *, new_head: bool = False
) -> tuple[WeightsWithHead, list[str]]:
    """Return the source of a model's tensors, and the stored names that the model lacks.

    Tensors outside of the model's body, and its pooler, may be missing from the files, or have another shape there.

    Args:
        model: a transformers model on the meta device.
        folder: config.json and safetensors files.
        seed: seed of new tensors.
        new_head: if True, ignore the head in the files.

    Raises:
        CheckpointError, ModelError: as in `pretrained_source`.
    """
    body = f"{model.base_model_prefix}."
    has_body = any(name.startswith(body) for name in model.state_dict())

    def may_lack(name: str) -> bool:
        return "pooler." in name or (has_body and not name.startswith(body))

    stored, unexpected = pretrained_source(model, folder, may_lack)
    if new_head:
        heads = [name for name in stored.entries if has_body and not name.startswith(body)]
        stored = stored.without(heads)
        unexpected = sorted([*unexpected, *heads])
    return WeightsWithHead(stored, model, seed), unexpected


class WeightsWithHead:
    """Source of any slice of a model's tensors. Tensors that the files lack are initialized from (seed, name).

    Args:
        stored: tensors of the files.
        model: the unsharded model on the meta device; buffers have their values. No reference to it is kept.
        seed: seed of new tensors.
    """

    def __init__(self, stored: JoinedTensors, model: nn.Module, seed: int):
        self._stored, self._seed = stored, seed
        # Read the state here, while the model is unsharded: sharding changes the model before anything is read.
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
        config = getattr(model, "config", None)
        self._std = float(getattr(config, "initializer_range", None) or _USUAL_STD)
        formats = {torch_dtype: name for name, torch_dtype in torch_formats().items()}
        self._made = {
            name: _MadeTensor(
                one.shape, formats[one.dtype], None if one.is_parameter else state[name].detach().cpu().numpy()
            )
            for name, one in originals_of(model).items()
            if one.first == name and name not in stored.entries
        }
        self.entries: Mapping[str, Any] = {**stored.entries, **self._made}

    @property
    def new_names(self) -> list[str]:
        """The names of tensors that the files lack."""
        return sorted(self._made)

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors read from files so far."""
        return self._stored.num_bytes_read

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a part's flat order.

        Args:
            name: name of the tensor.
            part: the elements of the full tensor that the part selects.
            start: first element to read, as an index into the part's flat order.
            out: filled to its end, in the dtype of the entry.

        Raises:
            CheckpointError: if bytes of the files are missing or cannot be read.
        """
        if name not in self._made:
            self._stored.read(name, part, start, out)
            return
        whole = self._compute_full(name)
        target = np.frombuffer(out, whole.dtype)
        target[:] = 0  # padding rows
        for view in part.views(start, start + len(target)):
            steps = tuple(stride * target.itemsize for stride in view.strides)
            sizes = tuple(high - low for low, high in view.box)
            there = np.lib.stride_tricks.as_strided(target[view.offset :], sizes, steps)
            there[...] = whole[tuple(slice(low, high) for low, high in view.box)]

    def _compute_full(self, name: str) -> np.ndarray:
        """Return a new full tensor. Heads are small, so it is computed again for each slice that is read."""
        made = self._made[name]
        if made.value is not None:
            return made.value
        found = torch.empty(made.shape, dtype=torch_formats()[made.dtype])
        if found.ndim == 1 and name.endswith("weight"):  # a norm's weight, of any class
            found.fill_(1.0)
        elif found.ndim == 1:
            found.zero_()
        else:
            initialise_parameter(found, name, nn.Module(), self._seed)
            found.mul_(self._std / _USUAL_STD)
        return found.numpy()


@dataclass(frozen=True, slots=True)
class _MadeTensor:
    """A tensor that the files lack. value: set for a buffer, which the model computes."""

    shape: tuple[int, ...]
    dtype: str
    value: np.ndarray | None


# Base of tasks on a Hugging Face folder: the model with its head, its weights, rows of texts, the run's files.

#: Label that is not counted.
IGNORED = -100
_ROWS = "rows.json"
#: Reason that no plan shards the sequences of these tasks.
_NO_CP = Limit((1,), "context parallelism shards packed causal texts, and this task pads full texts")


class FolderTask(Task):
    """Trains a model of a Hugging Face folder, with a head of some kind, on the rows of tables."""

    sections = ("model.path", "data.train", "data.eval", "data.holdout", "data.max_record_bytes",
                "data.max_bad_fraction", "data.cache_dir", "data.batching", "data.microbatch_cost",
                "train.seq_len")  # fmt: skip
    identity = ("model", "data.holdout", "train.seq_len")

    #: Suffix of transformers' AutoModelFor class, and its name in messages.
    head: ClassVar[str]
    head_words: ClassVar[str]
    #: Options that do not change the rows.
    free_options: ClassVar[tuple[str, ...]] = ("pad_multiple",)
    pad_multiple: int = 8
    #: True to ignore the folder's head and initialize a new one.
    new_head: bool = False
    #: Columns of a row that are padded.
    padded_columns: ClassVar[tuple[str, ...]] = ("input_ids",)

    _folder: RunFolder | None = None
    _tables: SplitTables | None = None
    _notes: Sequence[str] = ()

    # --- defined by each task ---

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        """Make rows of consecutive records. found: result of `survey` for the training records."""
        raise NotImplementedError

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        """Read all training records first, and return JSON values that their rows depend on."""
        return {}

    def finalize(self, found: Mapping[str, Any]) -> None:
        """Record the result of `survey`. Called before the model or a batch is built."""

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the row without counted labels, to pad the last batch of an evaluation."""
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
        """Return the plan fields that this task limits, in addition to its model's limits."""
        return {"cp": _NO_CP, **cost_limits(self.config)}

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the weights' names and shapes, and build rows from the data.

        Raises:
            CheckpointError: for weights that do not fit the config, or cannot be read.
            ConfigError: for texts longer than the model supports, and for token ids outside of its vocabulary.
            DataError: for invalid data, and for other data than the run was started with.
        """
        self._check_length()
        tables = TableReader(self.config.data, self._row_key(), self.rows, self._surveyed, report).tables()
        if (folder.path / _ROWS).is_file():
            self._refuse_other(folder, tables)
        self._take(tables)
        costs_of(self, 1, 1)  # a text that no microbatch can hold
        if self._needs_folder or not base_of(folder).is_dir():
            self._notes = self._weight_notes()

    def _surveyed(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        """Return the result of `survey`, and the padding id of batches."""
        tokenizer: Any = self.tokenizer()
        model: Any = self.shapes()
        entries, rows = len(tokenizer), model.get_input_embeddings().weight.shape[0]
        if entries > rows:
            rule = f"its tokenizer has {entries} entries, and its embedding {rows} rows"
            raise _wrong("model.path", self.config.model.path, f"{rule}. Give a tokenizer and weights of one model.")
        # The config's id first: heads find a text's last token by it, and RoBERTa the positions.
        own = _own_pad(self._own_config(), rows)
        pads = (own, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        return {"pad_id": next(one for one in pads if one is not None), **self.survey(records)}

    def _own_config(self) -> Any:
        from weft.models.inspect import hugging_face

        return hugging_face.load_model_config(self._base)

    def _weight_notes(self) -> list[str]:
        from weft.train.weights.published_weights import format_new_keys, format_unexpected_keys

        source, unexpected = source_with_head(self.shapes(), self._path, self.config.seed, new_head=self.new_head)
        return [*format_unexpected_keys(unexpected), *format_new_keys(source.new_names, self.config.seed)]

    def _check_length(self) -> None:
        from weft.models.inspect import hugging_face

        length, longest = self.config.train.seq_len, hugging_face.longest_text(self.shapes())
        if longest is not None and length > longest:
            raise _wrong("train.seq_len", length, f"the model reads at most {longest} tokens. Use {longest} or less.")

    def _row_key(self) -> list[Any]:
        hasher = hashlib.blake2b(digest_size=16)
        for file in sorted({file for pattern in COMPANIONS for file in self._base.glob(pattern)}):
            if file.name.startswith(("tokenizer", "vocab", "merges", "special", "added", "spiece", "sentencepiece")):
                hasher.update(file.name.encode() + read_regular(file, self._base))
        options = {key: value for key, value in self.config.task.options.items() if key not in self.free_options}
        return [self.config.task.name, options, self.config.train.seq_len, hasher.hexdigest()]

    def _refuse_other(self, folder: RunFolder, tables: SplitTables) -> None:
        if SplitTables.from_json(folder.text(_ROWS)).digests != tables.digests:
            raise DataError(
                f"data: the rows are not those that the run in {str(folder.path)!r} was started with. Use "
                f"{free_name(folder)} for a new run, or bring the old data back to resume."
            )

    def _take(self, tables: SplitTables) -> None:
        self._tables = tables
        self.finalize(tables.found)

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        """Copy the folder's files other than weights, with the task's fields in config.json."""
        self.keep_base(folder)
        tables = self.tables
        return {_ROWS: replace(tables, summary=(*tables.summary, *notes, *self._notes)).to_json()}

    def keep_base(self, folder: RunFolder) -> None:
        """Copy the folder's files other than weights, with the task's fields in config.json."""
        folder.path.mkdir(parents=True, exist_ok=True)
        keep_base(folder, self._path)
        file = base_of(folder) / "config.json"
        fields = json.loads(file.read_text("utf-8"))
        from weft.models.inspect import hugging_face

        changes = {
            "architectures": [type(self.shapes()).__name__],
            **self._changed(hugging_face.load_model_config(self._path)),  # the folder's config, not the changed model's
        }
        file.write_text(json.dumps({**fields, **changes}, indent=1) + "\n", "utf-8")

    def open(self, folder: RunFolder) -> None:
        self._folder = folder
        self._take(SplitTables.from_json(folder.text(_ROWS)))

    @property
    def tables(self) -> SplitTables:
        """The rows, after `prepare` or `open`."""
        assert self._tables is not None
        return self._tables

    @property
    def _needs_folder(self) -> bool:
        """True if resuming also reads the folder's weights: checkpoints of an adapter do not contain the base."""
        return bool(self.config.adapter.rank)

    @property
    def _path(self) -> Path:
        return Path(self.config.model.path).expanduser()

    @property
    def _base(self) -> Path:
        """Folder of config and tokenizer: the run's copy, or the model folder until a copy exists."""
        own = base_of(self._folder if self._folder is not None else run_folder(self.config))
        return own if own.is_dir() and (self._folder is not None or not self._path.is_dir()) else self._path

    def own_labels(self) -> Mapping[Any, str] | None:
        """Return the classes that the folder's config names."""
        return getattr(self._own_config(), "id2label", None)

    def tokenizer(self, **options: Any) -> Any:
        """Return the folder's transformers tokenizer. options: arguments of its loader."""
        from weft.models.inspect import hugging_face

        return hugging_face.load_tokenizer(self._base, **options)

    def encoded(
        self, texts: Any, pairs: Any = None, *, is_split: bool = False, most: int | None = None
    ) -> Iterator[Any]:
        """Yield the rows of texts, truncated to a number of tokens: ids, token types, truncation flag.

        Args:
            texts: each a text or a list of words.
            pairs: second texts, one for each.
            is_split: if True, texts are lists of words, and rows have the word index of each token, or -1.
            most: maximum tokens of a row; None for train.seq_len.
        """
        tokenizer = self.tokenizer(**({"add_prefix_space": True} if is_split else {}))
        found = self.tokenised(
            tokenizer, texts, pairs, max_length=most or self.config.train.seq_len, is_split_into_words=is_split
        )
        for one in found.encodings:
            row = {"input_ids": np.array(one.ids, np.int32), "is_cut": np.array([bool(one.overflowing)], np.uint8)}
            if "token_type_ids" in tokenizer.model_input_names:
                row["token_type_ids"] = np.array(one.type_ids, np.int8)
            if is_split:
                row["word_ids"] = np.array([-1 if word is None else word for word in one.word_ids], np.int64)
            yield row

    def tokenised(self, tokenizer: Any, texts: Any, pairs: Any = None, **options: Any) -> Any:
        """Return the tokenizer's output for some texts, truncated to a length.

        Args:
            tokenizer: a transformers tokenizer.
            texts: each a text or a list of words.
            pairs: second texts, one for each.
            options: further arguments of the tokenizer, such as max_length.

        Raises:
            DataError: if it takes too long, needs too much memory, or fails.
        """
        from weft.data.text.tokenizer_limits import bounded

        num_chars = sum(len(one) if isinstance(one, str) else sum(map(len, one)) for one in (*texts, *(pairs or ())))
        return bounded(lambda: tokenizer(texts, pairs, truncation=True, **options), num_chars)

    # --- batches ---

    def samples(self, split: str) -> Sequence[Any] | None:
        if split == "train":
            return self.tables.train
        table = self.tables.eval
        return None if table is None else FilledUp(table, self.config.train.global_batch, self.blank)

    def samples_per_epoch(self) -> int:
        return len(self.tables.train)

    def lengths(self) -> Sequence[int] | np.ndarray | None:
        """Return the padded length of each text in a batch of one, int64 (rows, padded columns)."""
        most, table = self.config.train.seq_len, self.tables.train
        columns = [table.lengths(name) for name in self.padded_columns]
        multiple = self.pad_multiple
        return np.stack([np.maximum(one, np.minimum(-(-one // multiple) * multiple, most)) for one in columns], axis=1)

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        """Return the FLOPs of texts divided by the FLOPs of one token.

        They count attention and all weights but embeddings.
        """
        from weft.models.inspect import hugging_face

        config: Any = hugging_face.load_model_config(self._base)
        costs = TokenCosts.of(self.shapes(), config.num_hidden_layers, config.hidden_size)
        return costs.work(lengths) / costs.work(1)

    def sample_lines(self, place: int) -> Sequence[str]:
        """Show the text that the model reads, and the other values of a row."""
        from weft.data.order.loader import visible
        from weft.train.tasks.indexed import sample_in_order  # imported here, because it loads torch

        lines, (_, row) = super().sample_lines(place), sample_in_order(self.samples("train"), self.config.seed, place)
        if not isinstance(row, Mapping) or "input_ids" not in row:
            return lines
        return [*lines, *visible(self.tokenizer().decode(row["input_ids"].tolist())).split("\n")]

    def padded_inputs(self, samples: Sequence[Mapping[str, np.ndarray]], pad_id: int) -> dict[str, torch.Tensor]:
        """Return ids, attention mask and token types, padded to the longest row.

        Args:
            samples: rows with `input_ids`, and `token_type_ids` if the model reads them.
            pad_id: padding id.
        """
        import torch

        lengths = [len(one["input_ids"]) for one in samples]
        length = padded_length(max(lengths), self.pad_multiple, self.config.train.seq_len)
        batch = {"input_ids": padded([one["input_ids"] for one in samples], pad_id, length)}
        batch["attention_mask"] = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
        if "token_type_ids" in samples[0]:
            batch["token_type_ids"] = padded([one["token_type_ids"] for one in samples], 0, length)
        return batch

    @property
    def pad_id(self) -> int:
        """The padding id of texts."""
        return self._found.get("pad_id", 0)

    @property
    def _found(self) -> Mapping[str, Any]:
        return {} if self._tables is None else self._tables.found

    # --- model ---

    def build(self) -> nn.Module:
        from weft.models.inspect import hugging_face

        config = hugging_face.load_model_config(self._base)
        for name, value in self._changed(config).items():
            setattr(config, name, value)
        return hugging_face.headed_model(config, self.head, self.head_words)

    def shapes(self) -> nn.Module:
        from weft.models.decoder import as_shapes

        with as_shapes(vectors=True):
            return self.build()

    def initial_model(self, plan: Plan) -> nn.Module:
        return self.shapes()

    def initial_weights(self, model: nn.Module) -> StateSource | None:

        if not (self._needs_folder or self._path.is_dir()):
            return None
        return source_with_head(model, self._path, self.config.seed, new_head=self.new_head)[0]

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return self.called(model, batch).logits

    def called(self, model: nn.Module, batch: Mapping[str, Any], **options: Any) -> Any:
        """Return the model's output for a batch without its labels.

        Args:
            model: a plain or sharded model.
            batch: by the names of the model's inputs.
            options: further arguments of its forward.
        """
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        return model(**inputs, **options)

    def _changed(self, config: Any) -> dict[str, Any]:
        """Return the task's config fields, and a padding id if the config has no valid one."""
        changes = dict(self.model_changes())
        if "pad_id" in self._found and _own_pad(config, self.pad_id + 1) != self.pad_id:
            changes["pad_token_id"] = self.pad_id
        return changes

    # --- planner ---

    def describe(self) -> PlannedModel:
        """Describe the model from a trace on ids only: with a mask, the trace would need the mask's values."""
        from weft.planner.search.model_source import read_model
        from weft.train.tasks.description import describe_by_tracing
        from weft.train.weights.run_adapter import adapter_size

        traced = describe_by_tracing(self.shapes())
        if traced.reads_sequence:  # a typical text of the task, not the model's maximum
            traced = replace(traced, default_seq_len=self.text_len())
        limits = {**dict(traced.limits), **self.limits()}
        found = read_model(replace(traced, name=self.name(), limits=tuple(limits.items())))
        adapter = adapter_size(self.shapes(), self.config, traced.num_layers)
        return replace(found, config=self.config, sample_unit=self.sample_unit, counted_adapter=adapter)

    def text_len(self) -> int:
        """Return the number of tokens of a text, for the planner."""
        return self.config.train.seq_len

    # --- text for users ---

    def name(self) -> str:
        return self._path.resolve().name

    def model_line(self) -> str:
        model = self.shapes()
        size = format_count(sum(param.numel() for param in model.parameters()))
        return f"{self.name()}: {type(model).__name__}, {size} parameters"

    def data_lines(self) -> Sequence[str]:
        return self.tables.summary


def _own_pad(config: Any, rows: int) -> int | None:
    """Return the padding id of a config, or None if it is not set or not below `rows`."""
    found = getattr(config.get_text_config(), "pad_token_id", None)
    return found if isinstance(found, int) and 0 <= found < rows else None


def _wrong(key: str, value: object, rule: str) -> ConfigError:
    return ConfigError([Problem(key, f"{key}={value}: {rule}")])
