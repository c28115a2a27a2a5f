"""A text from a text, with an encoder and a decoder: `task.name = "seq2seq"`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import ConfigError, Problem
from weft.train.task import Metric
from weft.train.tasks.tuned import class_counts
from weft.train.tasks.tuned.folder_task import IGNORED, FolderTask
from weft.train.tasks.tuned.padding import padded, padded_length
from weft.train.tasks.tuned.table_data import Rows, TableRecord

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Seq2SeqTask(FolderTask):
    """Translation, summaries, and whatever else turns one text into another.

    The decoder reads the target moved by one place, behind the token that the model's config starts with.

    source: column of the text that is read.
    target: column of the text that is written.
    prefix: put before every source, such as "summarize: ".
    target_len: tokens of a target; train.seq_len is for sources.
    pad_multiple: what lengths are rounded up to.
    """

    source: str = "source"
    target: str = "target"
    prefix: str = ""
    target_len: int = 128
    pad_multiple: int = 8

    unit, sample_unit = "tokens", "pairs"
    head, head_words = "Seq2SeqLM", "model for sequence to sequence"
    padded_columns = ("input_ids", "labels")
    sum_names = ("right",)
    metrics = (
        Metric("perplexity", "", "e to the mean loss over target tokens"),
        Metric("token_accuracy", "", "share of the target tokens that the model names, given those before"),
    )

    def __post_init__(self) -> None:
        if self.target_len < 2:
            rule = "a target has at least 2 tokens. Use 128."
            raise ConfigError(
                [Problem("task.options.target_len", f"task.options.target_len={self.target_len}: {rule}")]
            )

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        from weft.structure import hugging_face

        start, config = hugging_face.decoder_start(self.shapes()), self._own_config()
        if start == "last":  # of the target itself (mBART), where tokenizers put the language
            return {"start_id": None}
        for name in ("decoder_start_token_id", "bos_token_id"):
            start = getattr(config, name, None) if start is None else start
        if start is None:
            rule = "its config has no decoder_start_token_id. Add it to config.json."
            raise ConfigError([Problem("model.path", f"model.path={self.config.model.path}: {rule}")])
        return {"start_id": start}

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        from weft.data.tokens import bounded

        sources = [self.prefix + one.text(self.source, "source") for one in records]
        tokenizer: Any = self.tokenizer()
        targets = [one.text(self.target, "target") for one in records]
        wanted: Any = bounded(
            lambda: tokenizer(text_target=targets, truncation=True, max_length=self.target_len), sum(map(len, targets))
        )
        for row, target in zip(self.encoded(sources), wanted.encodings, strict=True):
            yield {
                **row,
                "labels": np.array(target.ids, np.int32),
                "is_cut": row["is_cut"] | np.uint8(bool(target.overflowing)),
            }

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "is_blank": np.ones(1, np.uint8)}

    def collate(self, samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        batch = self.padded_inputs(samples, self.pad_id)
        targets = [one["labels"] for one in samples]
        length = padded_length(max(map(len, targets)), self.pad_multiple, self.target_len)
        start = self._found["start_id"]
        read = [np.concatenate(([one[-1] if start is None else start], one[:-1])) for one in targets]
        counted = [
            one * 0 + IGNORED if "is_blank" in sample else one for one, sample in zip(targets, samples, strict=True)
        ]
        return {
            **batch,
            "decoder_input_ids": padded(read, self.pad_id, length),
            "labels": padded(counted, IGNORED, length),
        }

    def nominal_count(self) -> int:
        return self.config.train.global_batch * self.target_len

    def forward(self, model: Any, batch: Any) -> Any:
        return self.called(model, batch, use_cache=False).logits

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from weft.train.tasks.decoder_loss import token_cross_entropy

        return token_cross_entropy(output, batch)

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        return {"right": (output.argmax(-1) == batch["labels"]).sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        share = sums["right"] / sums["count"] if sums["count"] else None
        return {"perplexity": class_counts.perplexity(sums), "token_accuracy": share}
