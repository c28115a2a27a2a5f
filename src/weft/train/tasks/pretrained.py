"""Training of a Hugging Face folder's causal language model: `weft train model.path=FOLDER`.

Data, batches and loss are the decoder's. The model is built on the meta device, and each rank reads its slices from the
folder's files: no rank ever has the full model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoint.pretrained import no_folder
from weft.config.rules.rule import Facts
from weft.config.run_config import RunConfig
from weft.errors import ConfigError, ModelError, Problem
from weft.train.folder import run_folder
from weft.train.tasks.base import Report
from weft.train.tasks.decoder import DecoderTask
from weft.train.weights.decoder_files import base_of, keep_base, keep_files
from weft.train.weights.run_adapter import adapter_size
from weft.units import format_count

if TYPE_CHECKING:
    from torch import nn

    from weft.config.plan import Plan
    from weft.parallel.state.flat_slices import StateSource
    from weft.planner.search.model_source import PlannedModel
    from weft.train.folder import RunFolder


class PretrainedTask(DecoderTask):
    """Next-token prediction with a pretrained model on tokenised documents and chats."""

    _unexpected: Sequence[str] = ()

    # --- preparing ---

    def facts(self, world_size: int) -> Facts:
        train = self.config.train
        return Facts(world_size=world_size, global_batch=train.global_batch, seq_len=train.seq_len)

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the weights' names and shapes, and tokenise the data with the folder's tokenizer.

        Raises:
            CheckpointError: for weights that do not fit the config, or cannot be read.
            ConfigError: for sequences longer than the model supports, and for token ids outside of its vocabulary.
        """
        from weft.models.inspect import hugging_face
        from weft.train.weights.published_weights import format_unexpected_keys, pretrained_source

        model: Any = self.shapes()  # whose methods transformers types loosely
        length = self.config.train.seq_len
        if self._needs_folder and not self._path.is_dir():
            rule = "there is no such folder, and an adapter's checkpoints do not contain the base. Restore the folder."
            raise _wrong("model.path", self.config.model.path, rule)
        if self._needs_folder or not base_of(folder).is_dir():
            _, names = pretrained_source(model, self._path)
            self._unexpected = format_unexpected_keys(names)
        longest = hugging_face.longest_text(model)
        if longest is not None and length > longest:
            raise _wrong("train.seq_len", length, f"the model reads at most {longest} tokens. Use {longest} or less.")
        self._expect_separate(model)
        super().prepare(folder, report)
        rows = model.get_input_embeddings().weight.shape[0]
        if self.data.vocab_size > rows:
            rule = f"its tokenizer has {self.data.vocab_size} entries, and its embedding {rows} rows"
            raise _wrong(
                "model.path", self.config.model.path, f"{rule}. Give a tokenizer and weights that belong together."
            )

    def _data_config(self) -> RunConfig:
        words = {"kind": "file", "path": str(self._base), "template": True}
        return self.config.model_copy(update={"tokenizer": self.config.tokenizer.model_copy(update=words)})

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        keep_base(folder, self._path)
        return keep_files(folder, None, self.data, [*notes, *self._unexpected])

    @property
    def _needs_folder(self) -> bool:
        """True if resuming also reads the folder's weights: checkpoints of an adapter do not contain the base."""
        return bool(self.config.adapter.rank)

    @property
    def _path(self) -> Path:
        return Path(self.config.model.path).expanduser()

    @property
    def _base(self) -> Path:
        """Folder of config and tokenizer: the run's copy, or the model folder until a copy exists.

        Raises ConfigError without either: transformers would treat the path as the name of a model to download.
        """
        own = base_of(self._folder if self._folder is not None else run_folder(self.config))
        if own.is_dir() and (self._folder is not None or not self._path.is_dir()):
            return own
        if self._path.is_dir():
            return self._path
        raise ConfigError([Problem("model.path", no_folder(self._path))])

    # --- model and step ---

    def build(self) -> nn.Module:
        from weft.models.inspect import hugging_face

        return hugging_face.causal_model(hugging_face.load_model_config(self._base))

    def shapes(self) -> nn.Module:
        from weft.models.decoder import as_shapes

        with as_shapes(vectors=True):
            return self.build()

    def initial_model(self, plan: Plan) -> nn.Module:
        model = self.shapes()
        if rate := self._balance_rate():
            from weft.parallel.expert import balance_routers

            try:
                balance_routers(model, rate)
            except ModelError as error:
                raise _wrong(
                    "model.balance", "aux_loss", f"Weft cannot balance the routers of {type(model).__name__}. "
                    'Set model.balance="none".',
                ) from error  # fmt: skip
        return model

    def _balance_rate(self) -> float:
        """Return the weight of the auxiliary loss for expert load balancing, or 0."""
        from weft.models.inspect import hugging_face

        section, own = self.config.model, hugging_face.load_model_config(self._base).get_text_config(decoder=True)
        if section.balance == "bias":
            raise _wrong("model.balance", "bias", "routers of a folder have no bias to move. Use aux_loss or none.")
        is_on = getattr(own, "output_router_logits", False) if section.balance is None else section.balance != "none"
        if not is_on:
            return 0.0
        rate = section.balance_rate or getattr(own, "router_aux_loss_coef", None) or 0.0
        if not rate and section.balance == "aux_loss":
            raise _wrong("model.balance", "aux_loss", "its config has no router_aux_loss_coef. Set model.balance_rate.")
        return float(rate)

    def initial_weights(self, model: nn.Module) -> StateSource | None:
        from weft.train.weights.published_weights import pretrained_source

        is_read = self._needs_folder or self._path.is_dir()
        return pretrained_source(model, self._path)[0] if is_read else None

    def forward(self, model: nn.Module, batch: Any) -> Any:
        from weft.parallel.layers.documents import call_in_documents

        return call_in_documents(model, batch).logits

    def flops_per_count(self) -> float | None:
        from weft.models.inspect import hugging_face
        from weft.monitor.guards import flops_per_token

        model: Any = self.shapes()
        config: Any = hugging_face.load_model_config(self._base).get_text_config(decoder=True)
        head = model.get_output_embeddings()
        own = sum(param.numel() for param in model.parameters())
        tied = head is None or head.weight is model.get_input_embeddings().weight
        table = 0 if tied or head is None else head.weight.numel()
        return flops_per_token(own - table, config.num_hidden_layers, config.hidden_size, self.config.train.seq_len)

    # --- planner ---

    def describe(self) -> PlannedModel:
        """Describe the model from its config.json if the planner supports the family, or from a trace of it."""
        from weft.planner.search.model_source import read_model
        from weft.train.tasks.description import describe_by_tracing

        try:
            found = read_model(str(self._base / "config.json"))
        except ModelError:
            found = read_model(replace(describe_by_tracing(self.build_for_trace()), name=self.name()))
        # Adapter targets use transformers' layer names, which the planner does not have.
        adapter = adapter_size(self.shapes(), self.config, found.shape.layers)
        beside = {"config": self.config, "sample_unit": self.sample_unit, "counted_adapter": adapter}
        return replace(found, name=self.name(), **beside)

    def build_for_trace(self) -> nn.Module:
        """Return a separate model on the meta device: tracing changes it."""
        return self.shapes()

    # --- text for users ---

    def name(self) -> str:
        return self._path.resolve().name

    def model_line(self) -> str:
        return f"{self.name()}: {format_count(sum(param.numel() for param in self.shapes().parameters()))} parameters"


def _wrong(key: str, value: object, rule: str) -> ConfigError:
    return ConfigError([Problem(key, f"{key}={value}: {rule}")])
