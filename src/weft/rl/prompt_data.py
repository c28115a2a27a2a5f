"""Prompts of a run: rows of token ids with their records, the file in the run folder, and their order over steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from weft.config import partitioning as shares
from weft.config.run_config import RunConfig
from weft.config.sections import GrpoSection
from weft.data.store.prepare import cache_folder
from weft.data.store.prepared import PreparedData, ready_tokenizer
from weft.data.store.row_table import RowTable
from weft.data.table_data import Rows, SplitTables, TableReader, TableRecord
from weft.data.text.tokenizer import Tokenizer
from weft.data.text.turns import Unusable, read_turns
from weft.errors import DataError
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.folder import RunFolder
from weft.train.kept_tables import TableFile
from weft.train.tasks.base import Report
from weft.train.tasks.indexed import sample_index
from weft.units import format_count

_FILE = TableFile("prompts.json", "prompts")


def prompt_rows(records: Iterable[TableRecord], tokenizer: Tokenizer, column: str, longest: int) -> Rows:
    """Yield a row for each record: `ids` of the prompt, int32, and `record`, its values as JSON bytes.

    Args:
        records: records of files.
        tokenizer: renders and encodes prompts.
        column: column of the prompt: a text, or a list of messages.
        longest: maximum number of tokens of a prompt.

    Raises:
        DataError: if a record has no prompt, or it is empty or too long.
    """
    for record in records:
        ids = _prompt_ids(record, tokenizer, column)
        if not ids:
            record.refuse("its prompt has no tokens. Leave it out.")
        if len(ids) > longest:
            record.refuse(
                f"its prompt has {len(ids)} tokens, and train.seq_len and grpo.max_tokens leave {longest}. Leave it "
                "out, or increase train.seq_len."
            )
        text = json.dumps(dict(record.values), default=str).encode()
        yield {"ids": np.array(ids, np.int32), "record": np.frombuffer(text, np.uint8)}


def _prompt_ids(record: TableRecord, tokenizer: Tokenizer, column: str) -> list[int]:
    if column not in record.values:
        names = ", ".join(sorted(map(str, record.values)))
        record.refuse(f"it has no column {column!r}; it has {names}. Give the column's name with grpo.prompt=NAME.")
    value = record.values[column]
    if isinstance(value, str):
        return tokenizer.encode(value)
    if not isinstance(value, list):
        record.refuse(
            f"column {column!r} holds {json.dumps(value, default=str)[:80]}, and a text or messages are needed."
        )
    if not tokenizer.has_chat:
        record.refuse("its prompt has messages, and the tokenizer has no chat template. Use texts, or another model.")
    try:
        return tokenizer.encode_prompt(read_turns(value, "role", "content")).tolist()
    except (Unusable, DataError) as error:
        record.refuse(f"its messages cannot be used: {str(error).rstrip('.')}. Correct them, or leave the record out.")


def decoded(tokenizer: Tokenizer, ids: Iterable[int], *, specials: bool = False) -> str:
    """Return the text of ids. Ids of embedding rows beyond the tokenizer's entries have no text."""
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size], specials=specials)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A prompt: its token ids, and the values of its record by column. encode: returns the token ids of a text."""

    ids: tuple[int, ...]
    record: Mapping[str, Any]
    encode: Callable[[str], list[int]] = field(default=lambda text: [], repr=False, compare=False)


class PromptBatches:
    """One rank's batches, which the task replaces by completions: the step, and their numbers in the global batch.

    Prompts are shuffled in each epoch.

    Args:
        table: rows of `prompt_rows`.
        seed: the run's seed.
        share: the rank's share of the global batch, which counts completions.
        settings: completions of a prompt, and steps of a rollout.
    """

    def __init__(self, table: RowTable, seed: int, share: Share, settings: GrpoSection):
        self._table, self._seed, self._share, self._settings = table, seed, share, settings
        self.samples_per_epoch = len(table) * settings.completions * settings.updates_per_rollout

    def prompts(self, step: int) -> list[PromptRecord]:
        """Return the prompts of a step, counted from 0. All steps of a rollout have the same."""
        number = self._share.global_batch // self._settings.completions
        start = step // self._settings.updates_per_rollout * number
        rows = (self._table[sample_index(len(self._table), self._seed, start + one)[1]] for one in range(number))
        return [PromptRecord(tuple(row["ids"].tolist()), json.loads(row["record"].tobytes())) for row in rows]

    def batches(self, step: int) -> list[Any]:
        share = self._share
        own = shares.microbatch_samples(share.global_batch, share.size, share.microbatches, share.rank)

        def collate(numbers: list[int]) -> dict[str, Any]:
            return {"numbers": torch.tensor(numbers), "step": step}

        return Microbatches.of_samples(lambda number: number, own, collate, share.global_batch).marked()

    def iterate(self, start_step: int, end_step: int) -> AbstractContextManager[Iterator[list[Any]]]:
        return nullcontext(self.batches(step) for step in range(start_step, end_step))

    def state_at(self, num_samples: int) -> dict[str, int]:
        return {"samples": num_samples}


def tokenizer_only(config: RunConfig, report: Report | None) -> PreparedData:
    """Return data without documents, which has only the config's tokenizer, from the cache of this machine."""
    cache = cache_folder(config.data)
    cache.mkdir(parents=True, exist_ok=True)
    place, tokenizer = ready_tokenizer(cache, config, [], report)
    return PreparedData((), (), place, tokenizer.vocab_size, [])


class PromptData:
    """The prompts of a run: read once, named in the run folder, and in batches.

    config: the run's config.
    """

    def __init__(self, config: RunConfig):
        self._config = config
        self._tables: SplitTables | None = None

    @property
    def tables(self) -> SplitTables:
        """The prompts, after `read` or `open`."""
        assert self._tables is not None
        return self._tables

    def read(self, tokenizer: Tokenizer, report: Report | None) -> None:
        """Encode the prompts that are not in the cache.

        Raises:
            DataError: if a prompt is missing or too long.
        """
        column, longest = self._config.grpo.prompt, self._config.train.seq_len + 1 - self._config.grpo.max_tokens
        key = ["grpo", column, longest, str(tokenizer.vocabulary.digest)]

        def rows(records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
            return prompt_rows(records, tokenizer, column, longest)

        data = self._config.data.model_copy(update={"holdout": 0.0})
        tables = TableReader(data, key, rows, lambda records: {}, report).tables()
        lines = tuple(line for line in tables.summary if not line.startswith("evaluation"))
        self._tables = replace(tables, summary=lines)

    def refuse_other(self, folder: RunFolder) -> None:
        """Raise DataError if the folder has a run with other prompts."""
        _FILE.refuse_other(folder, self.tables)

    def kept(self, notes: Sequence[str]) -> Mapping[str, str]:
        """Return the content of the run folder's file by its name. notes: text for users."""
        return _FILE.text(self.tables, notes)

    def open(self, folder: RunFolder) -> None:
        """Open the prompts of the run in `folder`."""
        self._tables = _FILE.read(folder)

    def batches(self, share: Share) -> PromptBatches:
        """Return the batches of one rank."""
        return PromptBatches(self.tables.train, self._config.seed, share, self._config.grpo)

    def all_batches(self) -> PromptBatches:
        """Return the batches of all ranks as one."""
        return self.batches(Share(self._config.train.global_batch))

    def batch_line(self) -> str:
        """Return a line on the size of a step and of the run."""
        train, grpo = self._config.train, self._config.grpo
        prompts = train.global_batch // grpo.completions
        return (
            f"{prompts} prompts x {grpo.completions} completions of at most {grpo.max_tokens} tokens a step; "
            f"{grpo.method}; {train.steps} steps, {format_count(train.global_batch * train.steps)} completions"
        )

    def sample_lines(self, place: int, tokenizer: Tokenizer) -> list[str]:
        """Return the text of the prompt at a position in training order, which counts completions."""
        batch = self._config.train.global_batch
        number = place % batch // self._config.grpo.completions
        prompt = self.all_batches().prompts(place // batch)[number]
        text = decoded(tokenizer, prompt.ids, specials=True)
        return [f"prompt of {len(prompt.ids)} tokens", *text.split("\n")]
