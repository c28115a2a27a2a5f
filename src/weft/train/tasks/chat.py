"""Chats with images and audio clips, for pretrained vision-language and audio-language models: `task.name = "chat"`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from weft.config.plan import Plan
from weft.config.rules.rule import Facts
from weft.config.shapes.traced_model import Limit
from weft.data.media.chat_records import ChatAhead, ChatColumns, ChatItems, ChatRecords, ChatSurvey
from weft.data.media.folder_processor import FolderProcessor, joined
from weft.data.media.images import Look, read_picture
from weft.data.media.media_records import record_files
from weft.data.media.mixed_records import find_mixed
from weft.data.media.records import CHAT
from weft.data.store.prepare import cache_folder
from weft.errors import DataError
from weft.models.inspect import hugging_face
from weft.monitor.plots import GridSample
from weft.parallel.layers.documents import as_borders, attend_in_documents, reads_documents
from weft.train.batches.batching_by_cost import TokenCosts
from weft.train.folder import RunFolder
from weft.train.tasks.base import Metric, ModelTask, Report, setting_error
from weft.train.tasks.decoder_loss import perplexity, token_cross_entropy
from weft.train.tasks.folder_model import HeadedModel
from weft.train.tasks.folder_task import IGNORED, FilledUp, called, folder_limits, padded, padded_length
from weft.train.tasks.media import MediaTask, Progress

if TYPE_CHECKING:
    from weft.planner.search.model_source import PlannedModel

#: Parts of names of parameters by part of the model. All other parameters belong to the text model.
_PARTS = {
    "projector": ("merger", "multi_modal_projector.", ".connector."),
    "vision": (".visual.", ".vision_tower.", ".vision_model."),
    "audio": (".audio_tower.",),
}
_WHY = "images and audio enter the model in addition to tokens, and it is unknown which part of them belongs to a"
_LIMITS = {"pp": Limit((1,), f"{_WHY} stage"), "sp": Limit((0,), f"{_WHY} part of a sequence")}
#: Width and height of an image that a preview shows.
_SHOWN = 224
#: Families of models of which a test shows that conversations of one row stay apart.
PACKED = (
    "llava",
    "internvl",
    "idefics3",
    "smolvlm",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "llava_next",
    "llava_onevision",
)


@dataclass(eq=False)
class ChatTask(MediaTask, ModelTask):
    """Trains a vision-language or audio-language model of a Hugging Face folder on conversations.

    The folder's own processor and chat template make the inputs. The assistant's turns are trained.

    Attributes:
        data: records: a file, a folder or a glob of .tar shards, .jsonl or .parquet files, with messages and any number
            of images and audio clips.
        eval: records for evaluation; by default a share `holdout` of `data`.
        freeze: parts of the model that do not train: vision, audio, projector, text.
        max_pixels: larger images are scaled down to about this many pixels; 0: only as the processor does.
        pad_multiple: padded lengths are rounded up to a multiple of this.
        picture, audio, text: names of the columns of images, audio clips and messages; "" finds the usual names.
    """

    data: str
    eval: str = ""
    holdout: float = 0.1
    freeze: Sequence[str] = ()
    max_pixels: int = 0
    pad_multiple: int = 8
    picture: str = ""
    audio: str = ""
    text: str = ""

    unit, sample_unit = "tokens", "conversations"
    media_file = "conversations.json"
    sections = ("model.path", "data.cache_dir", "data.workers", "data.batching", "data.microbatch_cost",
                "data.max_bad_fraction", "data.packing", "data.reasoning", "train.seq_len")  # fmt: skip
    identity = ("model", "train.seq_len")
    metrics = (Metric("perplexity", "", "e to the mean loss over the tokens of answers"),)
    fills_seq_len = False

    def __post_init__(self) -> None:
        self.check_ranges(max_pixels=(0, 100_000_000), pad_multiple=(1, 4096))
        if isinstance(self.freeze, str) or not all(isinstance(part, str) for part in self.freeze):
            raise setting_error("task.options.freeze", self.freeze, 'it is a list of parts. Use ["vision"].')

    # --- the conversations ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the folder's model, processor and weights, and find the conversations.

        Raises:
            CheckpointError: if the weights cannot be read or do not fit the model's config, or the run trains on
                another path.
            ConfigError: if train.seq_len is more than the model supports, token ids are outside its vocabulary, or
                `freeze` names a part that it lacks.
            DataError: if the processor is not supported, or the data is invalid or has changed since the run was
                started.
        """
        self.network.check_length(self.config.train.seq_len)
        processor = self.processor.survey.processor
        self.network.check_vocabulary(len(processor.tokenizer))
        self.network.check_inputs(processor)
        super().prepare(folder, report)
        self.network.check_weights(folder)

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        self.network.keep(folder)
        return super().keep(folder, notes)

    def open(self, folder: RunFolder) -> None:
        self.network.open(folder)
        super().open(folder)

    @cached_property
    def processor(self) -> ChatProcessor:
        config = self.config
        survey = ChatSurvey(
            ChatColumns(self.text, self.picture, self.audio), FolderProcessor(self.network.base, self.max_pixels),
            config.train.seq_len, config.data.max_bad_fraction, config.data.reasoning,
        )  # fmt: skip
        _ = survey.template  # its errors come before the data's
        return ChatProcessor(survey, self)

    def samples(self, split: str) -> Any:
        found: Any = ChatAhead(self.processor.decoded(self.media(split), split), self.num_workers())
        return found if split == "train" else FilledUp(found, self.config.train.global_batch, self.blank)

    def blank(self, sample: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return a sample without trained tokens, to fill up the last batch of an evaluation."""
        return {**sample, "learnt": np.zeros_like(sample["learnt"])}

    def facts(self, world_size: int) -> Facts:
        train = self.config.train
        return Facts(
            world_size=world_size, global_batch=train.global_batch, seq_len=train.seq_len, limits=self.limits()
        )

    def limits(self) -> dict[str, Limit]:
        """Return limits of plan fields for this task, in addition to its model's limits."""
        return {**folder_limits(self.config), **_LIMITS}

    def nominal_count(self) -> int:
        return max(1, self.config.train.global_batch * self.config.train.seq_len // 4)

    # --- cost of samples ---

    def lengths(self) -> np.ndarray:
        """Return the padded tokens of each conversation with its images and audio clips, int64 (conversations,)."""
        counts, multiple = self.media("train").token_counts(), self.pad_multiple
        return np.maximum(counts, np.minimum(-(-counts // multiple) * multiple, self.config.train.seq_len))

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        model: Any = self.shapes()
        text = model.config.get_text_config(decoder=True)
        costs = TokenCosts.of(model.get_decoder(), text.num_hidden_layers, text.hidden_size)
        return costs.work(lengths) / costs.work(1)

    # --- the model ---

    @cached_property
    def network(self) -> ChatModel:
        """The folder's model."""
        return ChatModel(self.config, ("MultimodalLM", "vision-language or audio-language model"), self.freeze)

    def describe(self) -> PlannedModel:
        found = self.network.describe(self.config.train.seq_len, self.limits())
        return replace(found, config=self.config, sample_unit=self.sample_unit)

    def forward(self, model: Any, batch: Any) -> Any:
        return called(model, batch, use_cache=False).logits

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return token_cross_entropy(output, batch)

    loss.takes_head_loss = True

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"perplexity": perplexity(sums)}


class ChatModel(HeadedModel):
    """A vision-language or audio-language model of a folder, with frozen parts."""

    def __init__(self, config: Any, head: tuple[str, str], frozen: Sequence[str]):
        super().__init__(config, head)
        self._frozen = tuple(frozen)

    @property
    def packs(self) -> bool:
        """Whether a row may contain several conversations."""
        return self.config.data.packing == "fit"

    def initial(self, plan: Plan) -> nn.Module:
        model: Any = super().initial(plan)
        if self.packs:
            attend_in_documents(model.get_decoder())
        return model

    def check_inputs(self, processor: FolderProcessor) -> None:
        """Check that the model reads the inputs that a processor makes, and packs if the config packs.

        Raises:
            ConfigError: if conversations of one row would affect each other.
            DataError: if the model and the processor do not fit, or the model has an encoder of texts or balances its
                routers.
        """
        model, config, path = self.shapes(), self.read_config(), self.config.model.path
        if config.is_encoder_decoder:
            raise DataError(f"model.path={path}: an encoder reads its texts. Use a model with a decoder alone.")
        if getattr(config.get_text_config(decoder=True), "output_router_logits", False):
            rule = "task=chat does not compute the loss that balances its experts"
            raise DataError(f"model.path={path}: {rule}. Set output_router_logits to false in its config.json.")
        made = [*processor.types, *(name for kind in processor.kinds.values() for name in kind.inputs)]
        if odd := [name for name in made if name not in inspect.signature(model.forward).parameters]:
            rule = f"its processor makes {odd[0]}, which its {type(model).__name__} does not read"
            raise DataError(f"model.path={path}: {rule}. Use the processor of the model.")
        for is_sound in processor.kinds:
            token = (hugging_face.audio_token if is_sound else hugging_face.image_token)(config)
            if token not in processor.tokenizer(processor.empty(is_sound).text)["input_ids"]:
                rule = f"its config.json replaces token {token}, which its processor does not write"
                raise DataError(f"model.path={path}: {rule}. Use the processor of the model.")
        if self.config.data.packing in (None, "pad"):
            return
        kind, remedy = config.model_type, "Use data.packing=pad"
        if not self.packs:
            raise setting_error("data.packing", "concat", f"images cannot be cut. {remedy}, or fit.")
        if kind not in PACKED or not reads_documents(model.get_decoder()):
            rule = f"it is unknown whether conversations of one row affect each other in a {kind} model"
            raise setting_error("data.packing", "fit", f"{rule}. {remedy}.")

    def build(self) -> nn.Module:
        model = super().build()
        if not self._frozen:
            return model
        if self.config.adapter.rank:
            rule = "an adapter freezes the model already. Choose its layers with adapter.targets."
            raise setting_error("task.options.freeze", ", ".join(self._frozen), rule)
        owners = {name: _part_of(name) for name, _ in model.named_parameters()}
        if odd := [part for part in self._frozen if part not in owners.values()]:
            rule = f"the model has no such part. Use some of {', '.join(dict.fromkeys(owners.values()))}."
            raise setting_error("task.options.freeze", odd[0], rule)
        for name, param in model.named_parameters():
            if owners[name] in self._frozen:
                param.requires_grad_(False)
        return model


def _part_of(name: str) -> str:
    """Return the part of the model that a parameter belongs to: projector, vision, audio or text."""
    return next((part for part, marks in _PARTS.items() if any(mark in name for mark in marks)), "text")


@dataclass(frozen=True)
class ChatProcessor:
    """Processor of conversations with images and audio clips. survey: settings for reading records."""

    survey: ChatSurvey
    task: ChatTask

    def find(self, option: str, path: str, progress: Progress) -> Any:
        files = record_files(path, CHAT)
        if not files:
            raise DataError(
                f"task.options.{option}={path}: there is no .tar, .jsonl or .parquet file. Give files of records, each "
                "with messages and their images or audio clips."
            )
        return find_mixed(path, files, self.survey, cache_folder(self.task.config.data), progress, ChatRecords)

    def decoded(self, source: ChatRecords, split: str) -> ChatItems:
        return ChatItems(source, self.survey.processor)

    def collate(self, samples: list[Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Return padded tokens and labels, and the inputs of all images and audio clips in order.

        If the data has images or audio clips, but none of the samples does, a blank one is added. Attention excludes
        it. So every rank calls the encoder in every microbatch, and no rank waits for another.
        """
        processor, most = self.survey.processor, self.task.config.train.seq_len
        missing = [
            blank
            for is_sound, blank in self._blanks.items()
            if not any(name in one for one in samples for name in processor.kinds[is_sound].inputs)
        ]
        rows = next_fit([*samples, *missing], most) if self.task.network.packs else [[one] for one in samples]
        lengths = [[len(one["input_ids"]) for one in row] for row in rows]
        if not self.task.network.packs:
            rows[0] += missing
        merged = [_merged(row) for row in rows]
        length = padded_length(max(len(one["input_ids"]) for one in merged), self.task.pad_multiple, most)
        ids = padded([one["input_ids"] for one in merged], self._pad, length)
        learnt = padded([one["learnt"] for one in merged], 0, length)
        labels = ids.masked_fill(learnt == 0, IGNORED).roll(-1, 1)
        labels[:, -1] = IGNORED
        batch = {"input_ids": ids, "labels": labels}
        for name, known in processor.types.items():
            batch[name] = learnt.cummax(1).values if processor.has_suffix else torch.zeros_like(ids)
            for token, value in known.items():
                batch[name][ids == token] = value
        for name, join in [one for kind in processor.kinds.values() for one in kind.inputs.items()]:
            if given := [one[name] for one in merged if name in one]:
                parts = given if join == "rows" else [one.get(name, given[0][:0]) for one in merged]
                batch[name] = torch.from_numpy(joined(parts, join))
        if not self.task.network.packs:
            batch["attention_mask"] = (torch.arange(length) < torch.tensor(lengths)).long()
            return batch
        starts = [np.cumsum([0, *row]) for row in lengths]
        batch["attention_mask"] = as_borders(padded(starts, length, max(map(len, starts))))
        for row, own in enumerate(starts):
            labels[row, own[1:] - 1] = IGNORED  # the next token is another conversation's
        batch["position_ids"] = self._positions(batch, starts)
        return batch

    def _positions(self, batch: Mapping[str, Tensor], starts: Sequence[np.ndarray]) -> Tensor:
        """Return the positions of tokens in their conversations: (rows, length), or (3, rows, length) for M-RoPE.

        starts: first tokens of the conversations of each row, and the end of the last.
        """
        ids = batch["input_ids"]
        found = torch.arange(ids.shape[1]).repeat(len(ids), 1)
        for row, own in enumerate(starts):
            found[row] -= torch.from_numpy(own)[torch.searchsorted(torch.from_numpy(own), found[row], right=True) - 1]
        index = getattr(self._shapes, "get_rope_index", None)
        if index is None:
            return found
        places = [(row, slice(a, b)) for row, own in enumerate(starts) for a, b in pairwise(own.tolist())]
        names = (*self.survey.processor.types, "input_ids", "attention_mask")
        given = {**batch, "attention_mask": torch.ones_like(ids)}
        apart = {name: pad_sequence([given[name][place] for place in places], batch_first=True) for name in names}
        grids = {name: value for name, value in batch.items() if name.endswith("_grid_thw")}
        found = found.repeat(3, 1, 1)
        axes, _ = index(**apart, **grids)
        for number, (row, place) in enumerate(places):
            found[:, row, place] = axes[:, number, : place.stop - place.start]
        return found

    @cached_property
    def _shapes(self) -> Any:
        """The model without its head, on the meta device."""
        return self.task.network.shapes().base_model

    @cached_property
    def _blanks(self) -> dict[bool, dict[str, np.ndarray]]:
        """For images and audio clips in the data, a small one as a sample without trained tokens."""
        found, processor = {}, self.survey.processor
        media = [self.task.media(split).media_sizes()[1][:, 0] for split in ("train", "eval")]
        for is_sound in map(bool, np.unique(np.concatenate(media))):
            made = processor.empty(is_sound)
            ids = np.array(processor.tokenizer(made.text, add_special_tokens=False)["input_ids"], np.int32)
            found[is_sound] = {"input_ids": ids, "learnt": np.zeros(len(ids), np.uint8), **made.inputs}
        return found

    @cached_property
    def _pad(self) -> int:
        tokenizer = self.survey.processor.tokenizer
        return next(one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if one is not None)

    def described(self, source: ChatRecords, index: int) -> str:
        return f"{source.file(index)}: {self.survey.processor.tokenizer.decode(source.tokens(index).tolist())!r}"

    def preview(self, source: ChatRecords, split: str, epoch: int, index: int) -> GridSample:
        tokens, learnt = source.tokens(index).tolist(), source.learnt(index).tolist()
        cuts = [0, *(at for at in range(1, len(tokens)) if learnt[at] != learnt[at - 1]), len(tokens)]
        decode = self.survey.processor.tokenizer.decode
        entry = GridSample("", text=[(decode(tokens[a:b]), float(learnt[a])) for a, b in pairwise(cuts)])
        seen = next((number for number, (is_sound, _) in enumerate(source.sizes(index)) if not is_sound), None)
        if seen is None:
            return entry
        return replace(entry, picture=read_picture(source.medium(index, seen), Look(_SHOWN)))


def next_fit(samples: Sequence[Mapping[str, np.ndarray]], most: int) -> list[list[Mapping[str, np.ndarray]]]:
    """Divide samples into rows of at most `most` tokens, in order. A longer sample is a row."""
    rows: list[list[Mapping[str, np.ndarray]]] = []
    room = -1
    for one in samples:
        if len(one["input_ids"]) > room:
            rows.append([])
            room = most
        rows[-1].append(one)
        room -= len(one["input_ids"])
    return rows


def _merged(samples: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return samples as one."""
    names = dict.fromkeys(name for one in samples for name in one)
    return {name: joined([one[name] for one in samples if name in one], "rows") for name in names}
