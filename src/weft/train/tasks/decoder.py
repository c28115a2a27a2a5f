"""The decoder on text, which `weft train` trains if a config names no task.

Code for tokens, tokenizers, documents and prompts is in this module and the other decoder modules of this package.
torch is imported only when a model is built: preparing a run does not need it.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from weft.config.decoder_shape import DecoderSpec
from weft.config.model_spec import ModelSpec, resolve_decoder
from weft.config.rules.config_rules import least_vocab
from weft.config.rules.rule import Facts
from weft.config.run_config import RunConfig
from weft.data.order.stream import SampleStream
from weft.data.store.prepare import prepare_data
from weft.data.store.prepared import PreparedData
from weft.data.text.tokenizer import Tokenizer
from weft.errors import ConfigError, DataError, Problem
from weft.train.data_share import Batches, Share
from weft.train.tasks.base import Metric, Report, Task
from weft.train.weights.decoder_files import data_of, decoder_of, keep_files, refuse_other_data
from weft.units import format_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.config.plan import Plan
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder

#: Longer prompts are not printed: `weft generate` then takes the prompt from the data again.
_MAX_HINT = 80


class DecoderTask(Task):
    """Next-token prediction with one of Weft's decoders on tokenised documents."""

    unit = "tokens"
    sample_unit = "sequences"
    metrics = (Metric("bits_per_byte", "bits/byte", "loss per byte of text, comparable across tokenizers"),)
    sum_names = ("bytes",)
    leaves = ("samples/",)
    sections = ("model", "tokenizer", "data", "sample", "train.seq_len")
    # Data and saved tokenizers are compared by content, not by path. `prepare` checks them.
    identity = ("model", "tokenizer.kind", "tokenizer.vocab_size", "tokenizer.train_bytes", "data.holdout",
                "data.borders", "train.seq_len")  # fmt: skip

    #: True if the task trains on preference data.
    learns_preferences = False

    _data: PreparedData | None = None
    _folder: RunFolder | None = None

    # --- preparing ---

    def facts(self, world_size: int) -> Facts:
        train = self.config.train
        return Facts(
            model=self.spec, world_size=world_size, global_batch=train.global_batch, seq_len=train.seq_len
        )  # fmt: skip

    def changes(self, before: RunConfig) -> Sequence[tuple[str, Any, Any]]:
        # The weights of sources determine the order of samples. Their paths do not, if the content is the same.
        old, new = ([source.weight for source in settings.data.train] for settings in (before, self.config))
        if len(old) != len(new):
            return ()
        pairs = enumerate(zip(old, new, strict=True))
        return [(f"data.train.{number}.weight", *pair) for number, pair in pairs if pair[0] != pair[1]]

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Tokenise the data.

        Raises:
            DataError: if the tokens differ from those that the folder's run was started with.
        """
        from weft.data.store.prepare import check_trainable

        data = check_trainable(self.tokens(report), self.config.data, self.config.train.seq_len)
        if (folder.path / "data.json").exists():
            refuse_other_data(folder, data)
        self._data = data

    def _expect_separate(self, model: nn.Module) -> None:
        """Refuse packed documents in a transformers model whose attention would not separate them."""
        from weft.parallel.layers.documents import why_documents_mix

        data = self.config.data
        if not data.borders or data.packing == "pad" or self.learns_preferences:
            return
        if why := why_documents_mix(model):
            remedy = "Use data.packing=pad for one document a row, or data.borders=false if they may"
            raise ConfigError([Problem("data.borders", f"data.borders=true: {why}. {remedy}.")])

    def tokens(self, report: Report | None) -> PreparedData:
        """Tokenise the data that is not tokenised yet, and open the rest.

        Raises:
            DataError: for all problems with the data.
        """
        return prepare_data(self._data_config(), report, preferences=self.learns_preferences)

    def _data_config(self) -> RunConfig:
        """The config that prepares the data."""
        return self.config

    def samples_per_epoch(self) -> int:
        return self._stream(self.data.train, shuffle=True).num_sequences

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        return keep_files(folder, self.spec, self.data, notes)

    def open(self, folder: RunFolder) -> None:
        self._folder, self._data = folder, data_of(folder)

    @property
    def data(self) -> PreparedData:
        """The tokenised data, after `prepare` or `open`."""
        assert self._data is not None
        return self._data

    @property
    def spec(self) -> DecoderSpec:
        """Shape of the model: the folder's, or the shape that config and tokenizer determine so far."""
        if self._folder is not None:
            return decoder_of(self._folder)
        vocab_size = self._data.vocab_size if self._data is not None else least_vocab(self.config)
        return resolve_decoder(self.config.model, vocab_size)

    # --- batches ---

    def batches(self, share: Share) -> Batches:
        return _StreamBatches(self._stream(self.data.train, shuffle=True), share, len(self.config.data.train))

    def eval_batches(self, share: Share) -> Iterable[Any] | None:
        """Return the evaluation set, divided like the training batches: the same memory, the same for any plan."""
        from weft.data.order.loader import EvalBatches

        stream = self._stream(self.data.eval, shuffle=False)
        if not stream.num_sequences:
            return None
        return EvalBatches(
            stream,
            num_samples=self.config.eval.batches * share.global_batch,
            num_rows=share.rows,
            dp_rank=share.rank,
            dp_size=share.size,
        )

    def nominal_count(self) -> int:
        return self.config.train.global_batch * self.config.train.seq_len

    def _stream(self, sources: Any, shuffle: bool) -> SampleStream:
        config = self.config
        return SampleStream(
            sources,
            seed=config.seed,
            seq_len=config.train.seq_len,
            packing=config.data.packing,
            borders=config.data.borders,
            shuffle=shuffle,
        )

    # --- model and step ---

    def build(self) -> nn.Module:
        from weft.models.registry import build_decoder

        return build_decoder(self.spec, seed=self.config.seed)

    def shapes(self) -> nn.Module:
        from weft.models.registry import build_decoder

        return build_decoder(self.spec, device="meta")

    def initial_model(self, plan: Plan) -> nn.Module:
        from weft.models.registry import build_decoder

        # No rank of a pipeline has the full model: it is divided on the meta device, and each rank creates its stages'
        # weights.
        return build_decoder(self.spec, device="meta" if plan.pp > 1 else None, seed=self.config.seed)

    def forward(self, model: nn.Module, batch: Any) -> Any:
        from weft.train.tasks.decoder_loss import model_forward

        return model_forward(model, batch)

    def loss(self, output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        from weft.train.tasks.decoder_loss import token_cross_entropy

        return token_cross_entropy(output, batch)

    loss.takes_head_loss = True

    def sums(self, output: Any, batch: Any) -> Mapping[str, torch.Tensor]:
        from weft.train.tasks.decoder_loss import IGNORE

        labels = batch["labels"]
        # No index by a mask: the host would wait for the number of its elements.
        found = self._bytes_on(labels.device)[labels.clamp(min=0)].where(labels != IGNORE, 0)
        weights = batch.get("weights")
        return {"bytes": found.sum() if weights is None else (found * weights).sum(dtype=weights.dtype)}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        num_bytes = sums.get("bytes", 0.0)
        return {"bits_per_byte": sums["loss"] / (math.log(2) * num_bytes) if num_bytes else None}

    def flops_per_count(self) -> float | None:
        return decoder_flops_per_token(self.spec, self.config.train.seq_len)

    @cached_property
    def _token_bytes(self) -> dict[torch.device, torch.Tensor]:
        import torch

        assert self._folder is not None
        table = torch.from_numpy(Tokenizer.load(self._folder.path / "tokenizer").token_bytes)
        return {table.device: table}

    def _bytes_on(self, device: torch.device) -> torch.Tensor:
        """Return the bytes of text of each token id, (vocabulary,)."""
        tables = self._token_bytes
        if device not in tables:
            tables[device] = next(iter(tables.values())).to(device)
        return tables[device]

    # --- planner ---

    def describe(self) -> PlannedModel:
        from weft.planner.search.model_source import of_decoder

        return of_decoder(self.config.model.name, self.spec, self.config)

    # --- text for users ---

    def name(self) -> str:
        return self.config.model.name

    def model_line(self) -> str:
        return f"{self.name()}: {format_count(ModelSpec.of_decoder(self.spec).num_params)} parameters"

    def data_lines(self) -> Sequence[str]:
        return self.data.summary

    def batch_line(self) -> str:
        train = self.config.train
        tokens = train.global_batch * train.seq_len
        return (
            f"{train.global_batch} sequences of {train.seq_len} tokens: {format_count(tokens)} tokens a step, "
            f"{train.steps} steps, {format_count(tokens * train.steps)} tokens"
        )

    def sample_lines(self, place: int) -> Sequence[str]:
        """Show the text of a sequence. Tokens that are not trained are in double brackets."""
        from weft.data.order.loader import marked, view_sample

        sample = self._stream(self.data.train, shuffle=True).sample(place)
        view = view_sample(sample, self.data.tokenizer)
        source = self.data.train[sample.source].name
        counts = f"{view.num_trained} tokens trained, {view.num_masked} masked, {view.num_padding} padding"
        return [f"{source}, epoch {sample.epoch}: {counts}", *marked(view).split("\n")]

    def show(self, folder: RunFolder, step: int) -> str:
        from weft.train.tasks.generation import write_sample

        return write_sample(folder, self.config.sample, step)

    def try_line(self, folder: RunFolder) -> str:
        from weft.data.store.data_prompt import first_prompt

        command = shlex.join(["weft", "generate", str(folder.path)])
        try:
            data = self._data if self._data is not None else data_of(folder)
            words = first_prompt(data, data.tokenizer).words.strip()
        except (DataError, OSError):  # its tokens are gone
            return command
        is_short = 0 < len(words) <= _MAX_HINT and words.isprintable()
        return f"{command} --prompt {shlex.quote(words)}" if is_short else command


class _StreamBatches:
    """The loader of a stream of token sequences. Sources that are mixed by weight have separate epochs."""

    def __init__(self, stream: SampleStream, share: Share, num_sources: int):
        from weft.data.order.loader import Loader

        self._stream, self._num_sources = stream, num_sources
        self._loader = Loader(
            stream,
            global_batch=share.global_batch,
            accumulation=share.microbatches,
            dp_rank=share.rank,
            dp_size=share.size,
            pin=share.pin,
        )

    @property
    def samples_per_epoch(self) -> int | None:
        return self._stream.num_sequences if self._num_sources == 1 else None

    def batches(self, step: int) -> list[Any]:
        return self._loader.batches(step)

    def iterate(self, start_step: int, end_step: int) -> AbstractContextManager[Iterable[list[Any]]]:
        return self._loader.iterate(start_step, end_step)

    def state_at(self, num_samples: int) -> Any:
        return self._stream.state_at(num_samples)


def decoder_flops_per_token(spec: DecoderSpec, seq_len: int) -> float:
    """Return the FLOPs of forward and backward per token of a decoder, with the convention of `flops_per_token`."""
    from weft.monitor.guards import flops_per_token

    embedding = spec.vocab_size * spec.dim
    num_params = ModelSpec.of_decoder(spec).num_active_params - (0 if spec.tied else embedding)
    return flops_per_token(num_params, spec.num_layers, spec.dim, seq_len)
