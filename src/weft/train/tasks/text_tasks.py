"""Tasks on texts: masked language modelling, sequence to sequence, embeddings, and rewards of answers.

Masked language modelling is `task.name = "masked_lm"` (Devlin et al. 2018, arXiv 1810.04805).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch.nn import functional as F

from weft.config.shapes.traced_model import Limit
from weft.data.order.stream import derive_key
from weft.data.store.row_table import RowTable
from weft.data.table_data import Rows, TableRecord, label_fields
from weft.data.text.chat_template import ChatTemplate
from weft.data.text.documents import Document, read_pair
from weft.data.text.records import Record
from weft.data.text.schema import Schema
from weft.data.text.tokenizer_limits import bounded
from weft.data.text.turns import Unusable
from weft.errors import DataError
from weft.models.inspect import hugging_face
from weft.train.losses import GlobalBatchLoss
from weft.train.tasks.base import Metric, Task, setting_error
from weft.train.tasks.classification import NO_SP
from weft.train.tasks.decoder_loss import perplexity, token_cross_entropy
from weft.train.tasks.folder_task import IGNORED, FilledUp, FolderTask, called, padded, padded_length, tokenised

if TYPE_CHECKING:
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder
    from weft.train.tasks.base import Report

#: Selected tokens whose random number is below the first value become the mask token, below the second a random token.
_MASKED, _REPLACED = 0.8, 0.9


@dataclass(eq=False)
class MaskedTask(FolderTask):
    """Masked language modeling. Long texts become several rows.

    A share of the tokens of each row is selected at random, and predicted. 80 % of them become the mask token, 10 % a
    random token, and 10 % stay unchanged. Random numbers depend only on (seed, split, epoch, row, position).

    Attributes:
        text: name of the column with the text.
        share: share of selected tokens; at least one per row.
        pad_multiple: padded row lengths are rounded up to a multiple of this.
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
            raise setting_error("task.options.share", f"{self.share:g}", rule)

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        tokenizer: Any = self.network.tokenizer()
        if tokenizer.mask_token_id is None:
            rule = "its tokenizer has no mask token. Give the folder of a masked language model."
            raise setting_error("model.path", self.config.model.path, rule)
        return {"mask_id": tokenizer.mask_token_id, "num_entries": len(tokenizer)}

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        tokenizer: Any = self.network.tokenizer()
        texts = [one.text(self.text, "text") for one in records]
        length = self.config.train.seq_len
        cut = tokenised(tokenizer, texts, max_length=length, return_overflowing_tokens=True)
        for one in cut.encodings:
            is_text = 1 - np.array(one.special_tokens_mask, np.uint8)
            if is_text.any():
                yield {"input_ids": np.array(one.ids, np.int32), "is_text": is_text, "is_cut": np.zeros(1, np.uint8)}

    def samples(self, split: str) -> Sequence[Any] | None:
        table = self.tables.train if split == "train" else self.tables.eval
        if table is None:
            return None
        masked = _MaskedRows(table, self.tables.found, self.share, self.config.seed, split)
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
        return token_cross_entropy(output, batch)

    loss.takes_head_loss = True

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"perplexity": perplexity(sums)}


class _MaskedRows(Sequence[dict[str, np.ndarray]]):
    """Rows with masked tokens. Each epoch of training has different masks; evaluations always have the same masks."""

    def __init__(self, table: RowTable, found: Mapping[str, Any], share: float, seed: int, split: str):
        self._table, self._found, self._share = table, found, share
        self._seed, self._split = seed, split

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        return self.in_epoch(0, index)

    def in_epoch(self, epoch: int, index: int) -> dict[str, np.ndarray]:
        """Return the ids of a row with the masks of an epoch, and labels for the selected tokens."""
        row = self._table[index]
        ids, is_text = row["input_ids"], row["is_text"].astype(bool)
        # The random numbers of a token depend only on its position.
        stream = np.random.Generator(np.random.Philox(key=derive_key("mask", self._seed, self._split, epoch, index)))
        draws = stream.random((len(ids), 3))
        draw = np.where(is_text, draws[:, 0], 2.0)
        chosen = draw < max(self._share, draw.min() + 1e-12)
        tokens = ids.copy()
        tokens[chosen & (draws[:, 1] < _MASKED)] = self._found["mask_id"]
        replaced = chosen & (draws[:, 1] >= _MASKED) & (draws[:, 1] < _REPLACED)
        tokens[replaced] = (draws[replaced, 2] * self._found["num_entries"]).astype(np.int32)
        return {"input_ids": tokens, "labels": np.where(chosen, ids, IGNORED).astype(np.int32)}


# Sequence to sequence with an encoder and a decoder: `task.name = "seq2seq"`.


@dataclass(eq=False)
class Seq2SeqTask(FolderTask):
    """Translation, summaries, and other tasks that turn one text into another.

    The decoder reads the target shifted right by one. Its first token is the decoder start token of the model's config,
    or for models such as mBART the target's last token.

    Attributes:
        source: name of the column with the input text.
        target: name of the column with the output text.
        prefix: text that is put before every source, such as "summarize: ".
        target_len: maximum tokens of a target; train.seq_len is for sources.
        pad_multiple: padded lengths are rounded up to a multiple of this.
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
            raise setting_error("task.options.target_len", self.target_len, "a target has at least 2 tokens. Use 128.")

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        start, config = hugging_face.decoder_start(self.shapes()), self.network.read_config()
        if start == "last":  # from the target (mBART), in which tokenizers put the language
            return {"start_id": None}
        for name in ("decoder_start_token_id", "bos_token_id"):
            start = getattr(config, name, None) if start is None else start
        if start is None:
            rule = "its config has no decoder_start_token_id. Add it to config.json."
            raise setting_error("model.path", self.config.model.path, rule)
        return {"start_id": start}

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        sources = [self.prefix + one.text(self.source, "source") for one in records]
        tokenizer: Any = self.network.tokenizer()
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
        start = self.tables.found["start_id"]
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
        return called(model, batch, use_cache=False).logits

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return token_cross_entropy(output, batch)

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        return {"right": (output.argmax(-1) == batch["labels"]).sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        share = sums["right"] / sums["count"] if sums["count"] else None
        return {"perplexity": perplexity(sums), "token_accuracy": share}


# Text embeddings: `task.name = "embed"`.

Pooling = Literal["mean", "cls", "last"]
_NO_PP = Limit(
    (1,), "the loss compares all texts of the global batch, and a pipeline goes backward before they are there"
)


@dataclass(eq=False)
class EmbedTask(FolderTask):
    """Trains an embedding model on pairs of texts that belong together.

    Attributes:
        query: name of the column with the first text.
        positive: name of the column with the text that belongs to it.
        negative: name of the column with a text that does not, or "".
        pooling: pooling of token vectors: mean, cls (the first) or last.
        normalise: if True, vectors have length 1.
        temperature: divides the dot products of vectors.
        pad_multiple: padded text lengths are rounded up to a multiple of this.
    """

    query: str = "query"
    positive: str = "positive"
    negative: str = ""
    pooling: str = "mean"
    normalise: bool = True
    temperature: float = 0.05
    pad_multiple: int = 8

    unit = sample_unit = "pairs"
    head, head_words = "", "model"
    free_options = ("pad_multiple", "pooling", "normalise", "temperature")
    sum_names = ("within_1", "within_10")
    metrics = (
        Metric("recall_at_1", "", "share of the queries whose own text is the nearest of the evaluation set"),
        Metric("recall_at_10", "", "share of the queries whose own text is among the nearest ten"),
    )

    #: No batching by cost, because the loss compares all texts of a batch, in order.
    lengths = Task.lengths

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            rule = f"not one of {', '.join(get_args(Pooling))}. Use mean."
            raise setting_error("task.options.pooling", self.pooling, rule)
        if self.temperature <= 0:
            rule = "a temperature is above 0. Use 0.05."
            raise setting_error("task.options.temperature", f"{self.temperature:g}", rule)

    def limits(self) -> dict[str, Limit]:
        return {**super().limits(), "pp": _NO_PP}

    def survey(self, records: Iterator[TableRecord]) -> Mapping[str, Any]:
        config: Any = self.network.read_config()
        if getattr(config, "is_encoder_decoder", False):
            rule = "it is an encoder with a decoder, and embed needs an encoder or a decoder. Use an encoder's folder."
            raise setting_error("model.path", self.config.model.path, rule)
        return {}

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        options = {"query": self.query, "positive": self.positive}
        options |= {"negative": self.negative} if self.negative else {}
        columns = {
            option: list(self.encoded([one.text(column, option) for one in records]))
            for option, column in options.items()
        }
        for number in range(len(records)):
            texts = {option: rows[number] for option, rows in columns.items()}
            row = {f"{name}.{option}": one[name] for option, one in texts.items() for name in one if name != "is_cut"}
            yield {**row, "is_cut": np.max([one["is_cut"] for one in texts.values()], axis=0)}

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "is_blank": np.ones(1, np.uint8)}

    def collate(self, samples: Sequence[_Pair]) -> dict[str, torch.Tensor]:
        """Return the padded texts of the pairs, one pair after another, and a mask of the pairs that count."""
        rows = [one.row for one in samples]
        options = [name.partition(".")[2] for name in rows[0] if name.startswith("input_ids.")]
        names = {name.partition(".")[0] for name in rows[0] if "." in name}
        texts = [{name: one[f"{name}.{option}"] for name in names} for one in rows for option in options]
        counted = torch.tensor([0 if "is_blank" in one else 1 for one in rows])
        return {**self.padded_inputs(texts, self.pad_id), "is_counted": counted}

    def samples(self, split: str) -> Sequence[Any] | None:
        found = super().samples(split)
        return None if found is None else _Pairs(found)

    # --- planner ---

    def describe(self) -> PlannedModel:
        """Describe the model for the planner, with two or three texts per pair."""
        return replace(super().describe(), texts=3 if self.negative else 2)

    # --- model and step ---

    def forward(self, model: Any, batch: Any) -> Any:
        """Return the vectors of queries, positives and negatives, and a mask of the pairs that count."""
        inputs = {name: value for name, value in batch.items() if name != "is_counted"}
        states, mask = called(model, inputs).last_hidden_state, batch["attention_mask"]
        if self.pooling == "cls":
            pooled = states[:, 0]
        elif self.pooling == "last":
            last = mask.sum(1) - 1
            pooled = states.gather(1, last[:, None, None].expand(-1, 1, states.shape[-1]))[:, 0]
        else:
            weights = mask[..., None].to(states.dtype)
            pooled = (states * weights).sum(1) / weights.sum(1)
        wide = pooled if pooled.itemsize == 8 else pooled.float()
        vectors = F.normalize(wide, dim=-1) if self.normalise else wide
        counted = batch["is_counted"]
        each = vectors.unflatten(0, (len(counted), -1))
        return (*each.unbind(1), counted)

    @property
    def loss(self) -> GlobalBatchLoss:  # pyright: ignore[reportIncompatibleMethodOverride] - a loss of the whole batch is an object
        return GlobalBatchLoss(self._compare, self._score)

    def _compare(self, own: Any, every: Any, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the InfoNCE losses of some queries, and their number.

        A query's positive is compared with all positives and negatives of the batch.
        """
        texts, counted = torch.cat(every[1:-1]), every[-1].repeat(len(every) - 2)
        products = own[0] @ texts.T / self.temperature
        products = products.masked_fill(counted == 0, -torch.inf)
        is_own = own[-1] != 0
        losses = F.cross_entropy(products[is_own], places[is_own], reduction="sum")
        return losses, is_own.sum()

    def _score(self, own: Any, every: Any, places: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Count the queries whose positive is the nearest, or among the 10 nearest, of all positives."""
        products = (own[0] @ every[1].T).masked_fill(every[-1] == 0, -torch.inf)
        mine = products.gather(1, places[:, None])
        nearer, is_own = (products > mine).sum(1), own[-1] != 0
        return {"within_1": ((nearer < 1) & is_own).sum(), "within_10": ((nearer < 10) & is_own).sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        count = sums["count"]
        return {f"recall_at_{most}": sums[f"within_{most}"] / count if count else None for most in (1, 10)}


@dataclass(frozen=True, slots=True)
class _Pair:
    """A pair of texts. It counts as one row of a batch, so that random numbers do not depend on the texts' lengths."""

    row: Mapping[str, np.ndarray]


class _Pairs(Sequence[_Pair]):
    def __init__(self, rows: Sequence[Mapping[str, np.ndarray]]):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return _Pair(self._rows[index])


# Reward models: `task.name = "reward"`. The loss of a pair is -log sigmoid(r_chosen - r_rejected), the Bradley-Terry
# model (Ouyang et al. 2022, arXiv 2203.02155).


@dataclass(eq=False)
class RewardTask(FolderTask):
    """A model that scores answers, trained on pairs of answers.

    Attributes:
        chosen: name of the column with the better answer: a text, or messages, which use the chat template.
        rejected: name of the column with the worse one.
        prompt: name of the column with the prompt; records may lack it if both answers contain the prompt.
        center: weight of (r_chosen + r_rejected)^2, which keeps rewards near 0 (Eisenstein et al. 2023, arXiv
            2312.09244).
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
        """Check the adapter's settings, and prepare the run as `FolderTask.prepare` does.

        Raises:
            ConfigError: also if an adapter is set without adapter.modules_to_save, because it would freeze the head.
        """
        adapter = self.config.adapter
        if adapter.rank and not adapter.modules_to_save:
            rule = "an adapter freezes the new head. Add adapter.modules_to_save=score (classifier for encoders)."
            raise setting_error("adapter.rank", adapter.rank, rule)
        super().prepare(folder, report)

    def rows(self, records: list[TableRecord], found: Mapping[str, Any]) -> Rows:
        pairs = [self._pair(record) for record in records]
        texts = {"chosen": [one for one, _ in pairs], "rejected": [other for _, other in pairs]}
        columns = {kind: list(self.encoded(listed, add_special_tokens=False)) for kind, listed in texts.items()}
        for row in (dict(zip(columns, one, strict=True)) for one in zip(*columns.values(), strict=True)):
            named = {f"{name}.{kind}": one[name] for kind, one in row.items() for name in one if name != "is_cut"}
            yield {**named, "is_cut": np.max([one["is_cut"] for one in row.values()], axis=0)}

    def _pair(self, record: TableRecord) -> tuple[str, str]:
        """Return the chosen and the rejected text of a record, with special tokens.

        Raises DataError if the record is not a preference pair.
        """
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
        return None if found is None else _Pairs(found)

    def blank(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**row, "is_blank": np.ones(1, np.uint8)}

    def collate(self, samples: Sequence[_Pair]) -> dict[str, torch.Tensor]:
        rows = [one.row for one in samples]
        names = [name.removesuffix(".chosen") for name in rows[0] if name.endswith(".chosen")]
        texts = [{name: row[f"{name}.{kind}"] for name in names} for row in rows for kind in ("chosen", "rejected")]
        counted = torch.tensor([0 if "is_blank" in row else 1 for row in rows])
        return {**self.padded_inputs(texts, self.pad_id), "labels": counted}

    def _rewards(self, output: torch.Tensor, batch: Any) -> Iterator[torch.Tensor]:
        """Yield the rewards of the chosen and then of the rejected answers, (pairs,) each."""
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
