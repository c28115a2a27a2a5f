"""Masked language modelling: `task.name = "masked_lm"` (Devlin et al. 2018, arXiv 1810.04805)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.data.order import derive_key
from weft.data.prepared import RowTable
from weft.errors import ConfigError, Problem
from weft.train.task import Metric
from weft.train.tasks.tuned import class_counts
from weft.train.tasks.tuned.folder_task import IGNORED, FolderTask
from weft.train.tasks.tuned.padding import FilledUp, padded
from weft.train.tasks.tuned.table_data import Rows, TableRecord

if TYPE_CHECKING:
    import torch

#: Of the chosen tokens: those below the first number become the mask token, those up to the second any token.
_MASKED, _REPLACED = 0.8, 0.9


@dataclass(eq=False)
class MaskedTask(FolderTask):
    """Guessing the tokens that were masked. Long texts become several rows.

    Of each row a share of the tokens is chosen, by (seed, epoch, row, position). 80 % of them become the mask token,
    10 % any token, and 10 % stay as they are.

    text: column of the text.
    share: of the tokens that are chosen, at least one of each row.
    pad_multiple: what the length of a batch's rows is rounded up to.
    """

    text: str = "text"
    share: float = 0.15
    pad_multiple: int = 8

    unit, sample_unit = "masked_tokens", "rows"
    head, head_words = "MaskedLM", "masked language model"
    free_options = ("pad_multiple", "share")
    metrics = (Metric("perplexity", "", "e to the mean loss over masked tokens"),)

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            rule = "a share above 0 and below 1 is masked. Use 0.15."
            raise ConfigError([Problem("task.options.share", f"task.options.share={self.share:g}: {rule}")])

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        tokenizer: Any = self.tokenizer()
        if tokenizer.mask_token_id is None:
            rule = "its tokenizer has no mask token. Give the folder of a masked language model."
            raise ConfigError([Problem("model.path", f"model.path={self.config.model.path}: {rule}")])
        return {"mask_id": tokenizer.mask_token_id, "num_entries": len(tokenizer)}

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        tokenizer: Any = self.tokenizer()
        texts = [one.text(self.text, "text") for one in records]
        length = self.config.train.seq_len
        cut = self.tokenised(tokenizer, texts, max_length=length, return_overflowing_tokens=True)
        for one in cut.encodings:
            is_text = 1 - np.array(one.special_tokens_mask, np.uint8)
            if is_text.any():
                yield {
                    "input_ids": np.array(one.ids, np.int32),
                    "is_text": is_text,
                    "is_cut": np.zeros(1, np.uint8),
                }

    def samples(self, split: str) -> Sequence[Any] | None:
        table = self.tables.train if split == "train" else self.tables.eval
        if table is None:
            return None
        masked = _MaskedRows(table, self._found, self.share, self.config.seed, split)
        return masked if split == "train" else FilledUp(masked, self.config.train.global_batch, self.blank)

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "labels": np.full_like(row["labels"], IGNORED)}

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        batch = self.padded_inputs(samples, self.pad_id)
        labels = padded([one["labels"] for one in samples], IGNORED, batch["input_ids"].shape[1])
        return {**batch, "labels": labels}

    def nominal_count(self) -> int:
        return max(1, round(self.share * self.config.train.global_batch * self.config.train.seq_len))

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from weft.train.tasks.decoder_loss import token_cross_entropy

        return token_cross_entropy(output, batch)

    loss.takes_head_loss = True

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"perplexity": class_counts.perplexity(sums)}


class _MaskedRows(Sequence[dict[str, np.ndarray]]):
    """Rows with tokens masked. Each epoch of training has masks of its own; evaluations have one."""

    def __init__(self, table: RowTable, found: Mapping[str, Any], share: float, seed: int, split: str):
        self._table, self._found, self._share = table, found, share
        self._seed, self._split = seed, split

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        return self.in_epoch(0, index)

    def in_epoch(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Return a row as an epoch has it."""
        row = self._table[index]
        ids, is_text = row["input_ids"], row["is_text"].astype(bool)
        # Numbers of a position come from its place in the stream alone.
        stream = np.random.Generator(np.random.Philox(key=derive_key("mask", self._seed, self._split, epoch, index)))
        draws = stream.random((len(ids), 3))
        draw = np.where(is_text, draws[:, 0], 2.0)
        chosen = draw < max(self._share, draw.min() + 1e-12)
        tokens = ids.copy()
        tokens[chosen & (draws[:, 1] < _MASKED)] = self._found["mask_id"]
        replaced = chosen & (draws[:, 1] >= _MASKED) & (draws[:, 1] < _REPLACED)
        tokens[replaced] = (draws[replaced, 2] * self._found["num_entries"]).astype(np.int32)
        return {"input_ids": tokens, "labels": np.where(chosen, ids, IGNORED).astype(np.int32)}
