"""Reward models: `task.name = "reward"`. A head with one output scores a prompt with its answer.

The loss of a pair is -log sigmoid(r_chosen - r_rejected), the Bradley-Terry model (Ouyang et al. 2022, arXiv
2203.02155).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from weft.config.traced_model import Limit
from weft.data.text.chat_template import ChatTemplate
from weft.data.text.documents import Document, read_pair
from weft.data.text.records import Record
from weft.data.text.schema import Schema
from weft.data.text.turns import Unusable
from weft.errors import DataError
from weft.train.tasks.base import Metric, Task, setting_error
from weft.train.tasks.classification import NO_SP
from weft.train.tasks.folder_task import FolderTask
from weft.train.tasks.table_data import Rows, TableRecord, label_fields
from weft.train.tasks.text_tasks import Pair, Pairs

if TYPE_CHECKING:
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder
    from weft.train.tasks.base import Report


@dataclass(eq=False)
class RewardTask(FolderTask):
    """A model that scores answers, trained on pairs of answers.

    chosen: name of the column with the better answer: a text, or messages, which use the chat template.
    rejected: name of the column with the worse one.
    prompt: name of the column with the prompt; records may lack it if both answers contain the prompt.
    center: weight of (r_chosen + r_rejected)^2, which keeps rewards near 0 (Eisenstein et al. 2023, arXiv 2312.09244).
    new_head: ignore the folder's head and initialize a new one.
    pad_multiple: padded text lengths are rounded up to a multiple of this.
    """

    chosen: str = "chosen"
    rejected: str = "rejected"
    prompt: str = "prompt"
    center: float = 0.0
    new_head: bool = False
    pad_multiple: int = 8

    unit = sample_unit = "pairs"
    head, head_words = "SequenceClassification", "model for sequence classification"
    free_options = ("pad_multiple", "center", "new_head")
    sum_names = ("right", "margin")
    metrics = (
        Metric("reward_accuracy", "", "share of pairs whose chosen answer has the higher reward"),
        Metric("reward_margin", "", "mean reward of chosen minus rejected answers"),
    )

    def __post_init__(self) -> None:
        if self.center < 0:
            raise setting_error("task.options.center", f"{self.center:g}", "a weight is at least 0. Use 0.01.")

    def limits(self) -> dict[str, Limit]:
        return {**super().limits(), "sp": NO_SP}

    def model_changes(self) -> Mapping[str, Any]:
        return label_fields(["reward"])

    #: No batching by cost: a microbatch has pairs.
    lengths = Task.lengths

    def describe(self) -> PlannedModel:
        return replace(super().describe(), texts=2)

    # --- rows ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Prepare as other tasks on folders do.

        Raises:
            ConfigError: also if an adapter would freeze the new head.
        """
        adapter = self.config.adapter.model_dump()
        if adapter["rank"] and not adapter.get("modules_to_save"):
            rule = "an adapter freezes the new head. Add adapter.modules_to_save=score (classifier for encoders)."
            raise setting_error("adapter.rank", adapter["rank"], rule)
        super().prepare(folder, report)

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        pairs = [self._pair(record) for record in records]
        texts = {"chosen": [one for one, _ in pairs], "rejected": [other for _, other in pairs]}
        columns = {kind: list(self.encoded(listed, add_special_tokens=False)) for kind, listed in texts.items()}
        for row in (dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=True)):
            named = {f"{name}.{kind}": one[name] for kind, one in row.items() for name in one if name != "is_cut"}
            yield {**named, "is_cut": np.max([one["is_cut"] for one in row.values()], axis=0)}

    def _pair(self, record: TableRecord) -> tuple[str, str]:
        """Return the two texts of a record, with special tokens."""
        prompt = self.prompt if self.prompt in record.values else ""
        schema = Schema("preference", prompt=prompt, chosen=self.chosen, rejected=self.rejected)
        for option, column in (("chosen", self.chosen), ("rejected", self.rejected)):
            record.value(column, option)
        try:
            pair = read_pair(Record(record.file, record.number, dict(record.values)), schema)
            assert pair.other is not None
            return self._text(record, pair), self._text(record, pair.other)
        except (Unusable, DataError) as error:
            record.refuse(f"{error}. Leave the record out.")

    def _text(self, record: TableRecord, document: Document) -> str:
        tokenizer = self.network.tokenizer()
        if document.turns is None:
            first, last = tokenizer.bos_token or "", tokenizer.eos_token or ""
            return f"{first}{document.prompt or ''}{document.text}{last}"
        if self._template is None:
            if not tokenizer.chat_template:
                record.refuse("it has messages, and the tokenizer has no chat template. Write texts.")
            names = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
            template = {"chat_template": str(tokenizer.chat_template), **names}
            self._template = ChatTemplate(template, [str(one) for one in tokenizer.all_special_tokens])
        return self._template.render(document.turns, document.tools)[0]

    _template: ChatTemplate | None = None

    # --- batches: the two answers of a pair are adjacent rows ---

    def samples(self, split: str) -> Sequence[Any] | None:
        found = super().samples(split)
        return None if found is None else Pairs(found)

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "is_blank": np.ones(1, np.uint8)}

    def collate(self, samples: Sequence[Pair]) -> dict[str, torch.Tensor]:
        rows = [one.row for one in samples]
        names = [name.removesuffix(".chosen") for name in rows[0] if name.endswith(".chosen")]
        texts = [{name: row[f"{name}.{kind}"] for name in names} for row in rows for kind in ("chosen", "rejected")]
        counted = torch.tensor([0 if "is_blank" in row else 1 for row in rows])
        return {**self.padded_inputs(texts, self.pad_id), "labels": counted}

    def _rewards(self, output: torch.Tensor, batch: Any) -> Iterator[torch.Tensor]:
        """Return rewards of chosen and rejected answers, each (pairs,)."""
        wide = output if output.itemsize == 8 else output.float()
        yield from wide.view(-1, 2).unbind(1)

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, rejected = self._rewards(output, batch)
        losses = -F.logsigmoid(chosen - rejected) + self.center * (chosen + rejected).square()
        return (losses * batch["labels"]).sum(), batch["labels"].sum()

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        chosen, rejected = self._rewards(output, batch)
        counted = batch["labels"]
        return {"right": ((chosen > rejected) * counted).sum(), "margin": ((chosen - rejected) * counted).sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        count = sums["count"]
        names = {"reward_accuracy": "right", "reward_margin": "margin"}
        return {name: sums[key] / count if count else None for name, key in names.items()}
