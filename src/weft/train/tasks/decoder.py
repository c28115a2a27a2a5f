"""The text decoder, which `weft train` trains if a config names no task: its model, its data and its loss.

torch is imported only when a model is built: preparing a run of one of Weft's decoders does not need it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from weft.config.rules.config_rules import least_vocab
from weft.config.rules.rule import Facts
from weft.config.run_config import RunConfig
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import ModelSpec, resolve_decoder
from weft.config.shapes.traced_model import Limit
from weft.data.order.stream import SampleStream
from weft.data.store.data_prompt import first_prompt
from weft.data.store.prepare import cache_folder, check_trainable, prepare_data
from weft.data.store.prepared import PreparedData
from weft.data.store.streamed import StreamedSequences
from weft.data.text.tokenizer import Tokenizer
from weft.errors import DataError
from weft.train.batches.data_share import Batches, Share
from weft.train.tasks.base import Metric, ModelTask, Report
from weft.train.weights.decoder_files import data_of, decoder_of, keep_files, refuse_other_data, tokenizer_of
from weft.units import format_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder
    from weft.train.tasks.description import Forwards
    from weft.train.tasks.folder_model import CausalModel

#: Longer prompts are not printed: the suggested `weft generate` command then takes the prompt from the data.
_MAX_HINT = 80


class DecoderTask(ModelTask):
    """Next-token prediction on tokenised documents and chats.

    The model is one of Weft's decoders, or with model.path the causal language model of a Hugging Face folder.
    """

    unit = "tokens"
    sample_unit = "sequences"
    metrics = (Metric("bits_per_byte", "bits/byte", "loss per byte of text, comparable across tokenizers"),)
    sum_names = ("bytes",)
    leaves = ("samples/",)
    sections = ("model", "tokenizer", "data", "sample", "train.seq_len")
    # Data and saved tokenizers are compared by content, not by path. `prepare` checks them.
    identity = ("model", "tokenizer.kind", "tokenizer.vocab_size", "tokenizer.train_bytes", "tokenizer.add_tokens",
                "data.holdout", "data.borders", "data.stream", "train.seq_len")  # fmt: skip

    #: True if the task trains on preference data.
    learns_preferences = False
    #: False if it does not train on documents of its data.
    has_documents = True
    #: Plan fields that the task limits.
    plan_limits: ClassVar[Mapping[str, Limit]] = {}

    @cached_property
    def network(self) -> OwnDecoder | CausalModel:
        """The model that the config describes."""
        if not self.config.model.path:
            return OwnDecoder(self.config, self.text)
        from weft.train.tasks.folder_model import CausalModel

        return CausalModel(self.config, needs_weights=self.rereads_weights)

    @property
    def rereads_weights(self) -> bool:
        """True if a resumed run also reads the weights that it started from."""
        return False

    @cached_property
    def text(self) -> TokenData:
        """The data that the config describes."""
        return TokenData(self.config, preferences=self.learns_preferences)

    @property
    def data(self) -> PreparedData:
        """The tokenised data, after `prepare` or `open`."""
        return self.text.data

    @cached_property
    def _text_bytes(self) -> TextBytes:
        assert self.text.folder is not None
        return TextBytes(self.text.folder)

    # --- preparing ---

    def facts(self, world_size: int) -> Facts:
        train = self.config.train
        return Facts(
            model=self.network.spec,
            world_size=world_size,
            global_batch=train.global_batch,
            seq_len=train.seq_len,
            limits=self.plan_limits or None,
        )

    def changes(self, before: RunConfig) -> Sequence[tuple[str, Any, Any]]:
        # The weights of data sources determine the order of samples. Their paths do not, if the content is the same.
        old, new = ([source.weight for source in settings.data.train] for settings in (before, self.config))
        if len(old) != len(new):
            return ()
        pairs = enumerate(zip(old, new, strict=True))
        return [(f"data.train.{number}.weight", *pair) for number, pair in pairs if pair[0] != pair[1]]

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the weights of model.path, if it is set, and tokenise the data.

        Raises:
            CheckpointError: if the weights cannot be read, or do not fit the model's config.
            ConfigError: if sequences are longer than the model supports, token ids are outside its vocabulary, or its
                attention does not separate packed documents.
            DataError: if the data is invalid, or differs from the data that the folder's run was started with.
        """
        self.network.prepare(folder, packs=not self.learns_preferences)
        self.text.prepare(folder, self.tokens(report))
        self.network.check_vocabulary(self.data.vocab_size)

    def tokens(self, report: Report | None) -> PreparedData:
        """Tokenise the data that is not tokenised yet, and return all of it.

        Raises:
            DataError: if the data is missing or invalid.
        """
        return self.text.tokenise(report, self.network.tokenizer_folder, self.network.new_tokens)

    def samples_per_epoch(self) -> int:
        return self.text.stream("train").num_sequences

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        return self.network.keep(folder, self.data, notes)

    def open(self, folder: RunFolder) -> None:
        self.network.open(folder)
        self.text.open(folder)

    # --- batches ---

    def batches(self, share: Share) -> Batches:
        return self.text.batches(share)

    def eval_batches(self, share: Share) -> Iterable[Any] | None:
        return self.text.eval_batches(share)

    def nominal_count(self) -> int:
        return self.config.train.global_batch * self.config.train.seq_len

    # --- step ---

    def forward(self, model: nn.Module, batch: Any) -> Any:
        return self.network.forward(model, batch)

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from weft.train.tasks.decoder_loss import token_cross_entropy

        return token_cross_entropy(output, batch)

    loss.takes_head_loss = True

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        return {"bytes": self._text_bytes.of(batch["labels"], batch.get("weights"))}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        num_bytes = sums.get("bytes", 0.0)
        return {"bits_per_byte": sums["loss"] / (math.log(2) * num_bytes) if num_bytes else None}

    def flops_per_count(self) -> float | None:
        return self.network.flops_per_token()

    def describe(self) -> PlannedModel:
        return replace(self.network.describe(), config=self.config)

    # --- text for users ---

    def data_lines(self) -> Sequence[str]:
        return self.data.summary

    def batch_line(self) -> str:
        train = self.config.train
        tokens = train.global_batch * train.seq_len
        if (privacy := self.config.privacy).is_on:
            units = "documents" if privacy.unit == "document" else "sequences"
            return f"{train.global_batch} {units} expected in a step, at most {train.seq_len} tokens each sequence"
        return (
            f"{train.global_batch} sequences of {train.seq_len} tokens: {format_count(tokens)} tokens a step, "
            f"{train.steps} steps, {format_count(tokens * train.steps)} tokens"
        )

    def sample_lines(self, place: int) -> Sequence[str]:
        """Return the number of trained tokens in a sequence, and its text.

        Text without labels is in [[double brackets]].
        """
        return self.text.sample_lines(place)

    def sample(self, folder: RunFolder, step: int, forwards: Forwards) -> str:
        from weft.train.tasks.generation import write_sample

        return write_sample(folder, self.config.sample, step, forwards)

    def try_line(self, folder: RunFolder) -> str:
        command, words = shlex.join(["weft", "generate", str(folder.path)]), self.text.first_words(folder)
        is_short = 0 < len(words) <= _MAX_HINT and words.isprintable()
        return f"{command} --prompt {shlex.quote(words)}" if is_short else command


class OwnDecoder:
    """One of Weft's decoders, with the shape from the config and the vocabulary size of its data."""

    #: None, because the config describes the tokenizer.
    tokenizer_folder = None
    new_tokens = ()

    def __init__(self, config: RunConfig, text: TokenData):
        self._config, self._text = config, text

    @property
    def spec(self) -> DecoderSpec:
        """Shape of the model: from the run folder after it is opened, and before that from the config.

        The vocabulary size is the prepared data's, or a lower bound until the data is prepared.
        """
        if self._text.folder is not None:
            return decoder_of(self._text.folder)
        data = self._text.prepared
        return resolve_decoder(self._config.model, data.vocab_size if data is not None else least_vocab(self._config))

    def prepare(self, folder: RunFolder, *, packs: bool) -> None:
        """Do nothing: the decoder has no files, and supports packed documents."""

    def check_vocabulary(self, entries: int) -> None:
        """Do nothing: `spec` follows from the tokenizer."""

    def open(self, folder: RunFolder) -> None:
        """Do nothing: `spec` reads the run folder through the data."""

    def build(self) -> nn.Module:
        from weft.models.registry import build_decoder

        return build_decoder(self.spec, seed=self._config.seed)

    def shapes(self) -> nn.Module:
        from weft.models.registry import build_decoder

        return build_decoder(self.spec, device="meta")

    def initial(self, plan: Plan) -> nn.Module:
        # Under pipeline parallelism no rank has the full model: it is split on the meta device, and each rank creates
        # the weights of its stages.
        return self.shapes() if plan.pp > 1 else self.build()

    def weights(self, model: nn.Module) -> StateSource | None:
        return None

    def keep(self, folder: RunFolder, data: PreparedData, notes: Sequence[str]) -> Mapping[str, str]:
        """Copy the tokenizer into the run folder, and return the contents of model.json and data.json by file name."""
        return keep_files(folder, self.spec, data, notes)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return logits, (batch, time, vocabulary)."""
        from weft.train.tasks.decoder_loss import model_forward

        return model_forward(model, batch)

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward per token. An untied embedding table is not counted."""
        from weft.monitor.guards import flops_per_token

        spec = self.spec
        num_params = ModelSpec.of_decoder(spec).num_active_params - (0 if spec.tied else spec.vocab_size * spec.dim)
        return flops_per_token(num_params, spec.num_layers, spec.dim, self._config.train.seq_len)

    def describe(self) -> PlannedModel:
        """Describe the decoder for the planner."""
        from weft.planner.search.model_source import of_decoder

        return of_decoder(self.name(), self.spec)

    def name(self) -> str:
        return self._config.model.name

    def line(self) -> str:
        return f"{self.name()}: {format_count(ModelSpec.of_decoder(self.spec).num_params)} parameters"


class TokenData:
    """Tokenised documents of a config, as batches of sequences.

    preferences: True if the documents are preference data.
    """

    def __init__(self, config: RunConfig, *, preferences: bool = False):
        self._config, self._preferences = config, preferences
        #: The data, after it is prepared or opened.
        self.prepared: PreparedData | None = None
        #: The run's folder, after it is opened.
        self.folder: RunFolder | None = None

    @property
    def data(self) -> PreparedData:
        """The tokenised data, after `prepare` or `open`."""
        assert self.prepared is not None
        return self.prepared

    def tokenise(
        self, report: Report | None, tokenizer: str | None = None, new_tokens: Sequence[str] = ()
    ) -> PreparedData:
        """Tokenise the data that is not tokenised yet, and return all of it.

        tokenizer: Hugging Face folder of the tokenizer and its chat template, or None for the config's tokenizer.
        new_tokens: tokens that the folder's tokenizer lacks.

        Raises:
            DataError: if the data is missing or invalid.
        """
        return prepare_data(self.with_tokenizer(tokenizer, new_tokens), report, preferences=self._preferences)

    def with_tokenizer(self, folder: str | None, new_tokens: Sequence[str]) -> RunConfig:
        """Return the config with the tokenizer of a Hugging Face folder, or unchanged for None."""
        config = self._config
        if folder is None:
            return config
        update = {"kind": "file", "path": folder, "template": True, "add_tokens": tuple(new_tokens)}
        return config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update=update)})

    def prepare(self, folder: RunFolder, data: PreparedData) -> None:
        """Check tokenised data, and set `prepared` to it.

        Raises:
            DataError: if the data cannot be trained on, or differs from the data of the run in `folder`.
        """
        data = check_trainable(data, self._config.data, self._config.train.seq_len)
        if (folder.path / "data.json").exists():
            refuse_other_data(folder, data)
        self.prepared = data

    def open(self, folder: RunFolder) -> None:
        """Open the data of the run in `folder`."""
        self.folder, self.prepared = folder, data_of(folder)

    def stream(self, split: str, *, shuffle: bool = True) -> SampleStream:
        """Return the sequences of "train" in training order, or without `shuffle`, or of "eval", in stored order."""
        config = self._config
        if split == "train" and config.data.stream:
            return StreamedSequences(self.data, config, cache_folder(config.data))
        return SampleStream(
            self.data.train if split == "train" else self.data.eval,
            seed=config.seed,
            seq_len=config.train.seq_len,
            packing=config.data.packing,
            borders=config.data.borders,
            shuffle=shuffle and split == "train",
        )

    def batches(self, share: Share) -> Batches:
        """Return the training batches of one rank."""
        from weft.data.order.loader import Loader

        return Loader(
            self.stream("train"),
            global_batch=share.global_batch,
            accumulation=share.microbatches,
            dp_rank=share.rank,
            dp_size=share.size,
            pin=share.pin,
            timeline=share.timeline,
        )

    def eval_batches(self, share: Share) -> Iterable[Any] | None:
        """Return one rank's evaluation batches, which are split like training batches, or None without evaluation data.

        The samples do not depend on the plan.
        """
        from weft.data.order.loader import EvalBatches

        stream = self.stream("eval")
        if not stream.num_sequences:
            return None
        return EvalBatches(
            stream,
            num_samples=self._config.eval.batches * share.global_batch,
            num_rows=share.rows,
            dp_rank=share.rank,
            dp_size=share.size,
        )

    def sample_lines(self, place: int) -> Sequence[str]:
        """Return the number of trained tokens of the sequence at a position in training order, and its text."""
        from weft.data.order.loader import marked, view_sample

        sample = self.stream("train").sample(place)
        view = view_sample(sample, self.data.tokenizer)
        source = self.data.train[sample.source].name
        counts = f"{view.num_trained} tokens trained, {view.num_masked} masked, {view.num_padding} padding"
        return [f"{source}, epoch {sample.epoch}: {counts}", *marked(view).split("\n")]

    def first_words(self, folder: RunFolder) -> str:
        """Return the first prompt of the data, or "" if the tokenised data cannot be read."""
        try:
            data = self.prepared if self.prepared is not None else data_of(folder)
            return first_prompt(data, data.tokenizer).words.strip()
        except (DataError, OSError):
            return ""


class TextBytes:
    """Bytes of the text of token ids.

    folder: the run's folder, which has the tokenizer.
    """

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._tables: dict[Any, torch.Tensor] = {}  # bytes of each token, by device

    def of(self, labels: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        """Return the number of text bytes of the labels, weighted like the loss.

        labels: token ids, or -100. weights: weight of each label, or None.
        """
        import torch

        from weft.train.tasks.decoder_loss import IGNORE

        if labels.device not in self._tables:
            table = torch.from_numpy(Tokenizer.load(tokenizer_of(self._folder)).token_bytes)
            self._tables[labels.device] = table.to(labels.device)
        # Do not index with a mask: the host would wait for the number of selected elements.
        found = self._tables[labels.device][labels.clamp(min=0)].where(labels != IGNORE, 0)
        return found.sum() if weights is None else (found * weights).sum(dtype=weights.dtype)
