"""Prompts as rows of token ids with their records, and their order over steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from weft.config import partitioning as shares
from weft.config.sections import GrpoSection
from weft.data.store.row_table import RowTable
from weft.data.table_data import Rows, TableRecord
from weft.data.text.tokenizer import Tokenizer
from weft.data.text.turns import Unusable, read_turns
from weft.errors import DataError
from weft.train.batches.data_share import Share
from weft.train.batches.microbatches import Microbatches
from weft.train.tasks.indexed import sample_index


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
