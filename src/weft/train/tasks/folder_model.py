"""Models of Hugging Face folders as parts of tasks: causal language models, and models with another head.

The model is built on the meta device. Each rank reads only its slices from the folder's files.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from weft.checkpoint.pretrained import JoinedTensors, no_folder
from weft.checkpoint.read import Part
from weft.checkpoint.read_tensors import copy_part
from weft.checkpoint.safetensors_files import torch_formats
from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.config.shapes.traced_model import Limit
from weft.data.store.prepared import PreparedData
from weft.errors import ConfigError, DataError, ModelError, Problem
from weft.files import COMPANIONS, read_regular
from weft.hub import local_folder
from weft.models.decoder import as_shapes
from weft.models.initialize import initialise_parameter
from weft.models.inspect import hugging_face
from weft.monitor.guards import flops_per_token
from weft.parallel.expert import balance_routers
from weft.parallel.layers.documents import call_in_documents, why_documents_mix
from weft.parallel.state.flat_slices import StateSource, originals_of
from weft.planner.search.model_source import PlannedModel, read_model
from weft.train.batches.batching_by_cost import TokenCosts
from weft.train.folder import RunFolder, run_folder
from weft.train.tasks.base import setting_error
from weft.train.tasks.description import describe_by_tracing
from weft.train.weights.added_rows import add_to_files, entries_of, number_of_rows, write_added_rows
from weft.train.weights.decoder_files import base_of, keep_base, keep_files
from weft.train.weights.published_weights import (
    ADDED_ROWS,
    format_new_keys,
    format_unexpected_keys,
    pretrained_source,
)
from weft.train.weights.run_adapter import adapter_size
from weft.units import format_count


class FolderModel:
    """A model of a Hugging Face folder: its config, its tokenizer and its weights. A subclass builds the module.

    Args:
        config: the run's config, with model.path.
        needs_weights: True if a resumed run also reads the folder's weights, because an adapter's checkpoints lack the
            base.
    """

    def __init__(self, config: RunConfig, *, needs_weights: bool = False):
        self.config, self.needs_weights = config, needs_weights or bool(config.adapter.rank)
        self.path = local_folder(config.model.path)
        self._folder: RunFolder | None = None
        self._computed_rows: Path | None = None
        #: Lines about the weights for users, set after the weights are checked.
        self.notes: Sequence[str] = ()

    def open(self, folder: RunFolder) -> None:
        """Use the config and tokenizer in the run's copy of the model folder."""
        self._folder = folder

    @property
    def base(self) -> Path:
        """Folder of config and tokenizer: after `open` the run's copy, before it the model folder.

        If that folder is missing, it is the other one. Raises ConfigError if both are missing, because transformers
        would try to download a model of that name.
        """
        own = base_of(self._folder if self._folder is not None else run_folder(self.config))
        if own.is_dir() and (self._folder is not None or not self.path.is_dir()):
            return own
        if self.path.is_dir():
            return self.path
        raise ConfigError([Problem("model.path", no_folder(self.path))])

    def read_config(self) -> Any:
        """Return the folder's transformers config, with `vocab_size` set to this run's number of embedding rows."""
        config = hugging_face.load_model_config(self.base)
        if self.base == self.path and self.num_rows is not None:
            config.get_text_config().vocab_size = self.num_rows
        return config

    @property
    def new_tokens(self) -> Sequence[str]:
        """The tokens that are to be added to the tokenizer in `base`; () for the run's copy, which has them."""
        return self.config.tokenizer.add_tokens if self.base == self.path else ()

    @cached_property
    def num_rows(self) -> int | None:
        """Number of embedding rows after adding rows to the embeddings of model.path.

        None if no rows are added, or model.path is missing.
        """
        return number_of_rows(self.config, self.path) if self.path.is_dir() else None

    @property
    def added_rows(self) -> Path | None:
        """File with the rows that are added to the folder's embeddings, or None without such rows.

        If the run folder has no such file, the rows are computed and written to a temporary file, which is deleted with
        this object.
        """
        kept = base_of(self._folder if self._folder is not None else run_folder(self.config)) / ADDED_ROWS
        if kept.is_file() or self.num_rows is None:
            return kept if kept.is_file() else None
        if self._computed_rows is None:
            folder, plain = tempfile.mkdtemp(prefix="weft-rows-"), copy.copy(self)
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            plain.num_rows = None
            write_added_rows(Path(folder) / ADDED_ROWS, self.shapes(), plain.shapes(), self.path, self.config.seed)
            self._computed_rows = Path(folder) / ADDED_ROWS
        return self._computed_rows

    def keep_copy(self, folder: RunFolder) -> None:
        """Copy the model folder's files except weights into the run folder, with the added tokens and rows."""
        tokens, rows, file = self.new_tokens, self.num_rows, self.added_rows
        keep_base(folder, self.path, lambda draft: add_to_files(draft, tokens, rows, file))

    def build(self) -> nn.Module:
        """Return the model, in plain PyTorch."""
        raise NotImplementedError

    def shapes(self) -> Any:
        """Return a new model on the meta device."""
        with as_shapes(vectors=True):
            return self.build()

    def initial(self, plan: Plan) -> nn.Module:
        """Return the model that a rank of `plan` starts from, on the meta device."""
        return self.shapes()

    def source(self, model: nn.Module) -> tuple[StateSource, list[str]]:
        """Return an object that reads a model's tensors from files, and lines for users about other tensors.

        These are tensors in the files that the model lacks, and new ones that the files lack.
        """
        found, unexpected = pretrained_source(model, self.path, added=self.added_rows)
        return found, format_unexpected_keys(unexpected)

    def weights(self, model: nn.Module) -> StateSource | None:
        """Return an object that reads the folder's weights.

        Return None if the folder is missing and the run reads all weights from a checkpoint.
        """
        return self.source(model)[0] if self.needs_weights or self.path.is_dir() else None

    def check_weights(self, folder: RunFolder) -> None:
        """Check names and shapes of the model folder's weights, and set `notes`.

        Does nothing if `folder` belongs to a resumed run that reads all weights from a checkpoint.

        Raises:
            CheckpointError: if the weights cannot be read, or do not fit the model's config.
        """
        if self.needs_weights or not base_of(folder).is_dir():
            self.notes = self.source(self.shapes())[1]

    def check_length(self, length: int) -> None:
        """Check that the model supports texts of `length` tokens.

        Raises:
            ConfigError: if it does not.
        """
        longest = hugging_face.longest_text(self.shapes())
        if longest is not None and length > longest:
            raise setting_error(
                "train.seq_len", length, f"the model reads at most {longest} tokens. Use {longest} or less."
            )

    def check_vocabulary(self, entries: int) -> int:
        """Return the number of rows of the model's embedding.

        entries: number of entries of the tokenizer.

        Raises:
            ConfigError: if the tokenizer has more entries than rows.
        """
        rows = self.shapes().get_input_embeddings().weight.shape[0]
        if entries > rows:
            rule = f"its tokenizer has {entries} entries, and its embedding {rows} rows"
            remedy = f"Set model.vocab_size={entries} to add rows, or give a tokenizer and weights of one model."
            raise setting_error("model.path", self.config.model.path, f"{rule}. {remedy}")
        return rows

    def name(self) -> str:
        return self.path.resolve().name

    def size(self) -> str:
        """Return the number of parameters, for users."""
        return f"{format_count(sum(param.numel() for param in self.shapes().parameters()))} parameters"


class CausalModel(FolderModel):
    """A causal language model of a Hugging Face folder, for next-token prediction."""

    #: None, because the planner's rules read the traced model, not a shape.
    spec = None

    @property
    def tokenizer_folder(self) -> str:
        """Folder of the tokenizer and its chat template."""
        return str(self.base)

    def build(self) -> nn.Module:
        return hugging_face.causal_model(self.read_config())

    def initial(self, plan: Plan) -> nn.Module:
        model = self.shapes()
        if rate := self._balance_rate():
            try:
                balance_routers(model, rate)
            except ModelError as error:
                rule = f'Weft cannot balance the routers of {type(model).__name__}. Set model.balance="none".'
                raise setting_error("model.balance", "aux_loss", rule) from error
        return model

    def _balance_rate(self) -> float:
        """Return the weight of the auxiliary loss for expert load balancing, or 0 without it.

        Raises ConfigError if model.balance is "bias", or "aux_loss" and no weight is set.
        """
        section, own = self.config.model, self.read_config().get_text_config(decoder=True)
        if section.balance == "bias":
            raise setting_error(
                "model.balance", "bias", "routers of a folder have no bias to move. Use aux_loss or none."
            )
        is_on = getattr(own, "output_router_logits", False) if section.balance is None else section.balance != "none"
        if not is_on:
            return 0.0
        rate = section.balance_rate or getattr(own, "router_aux_loss_coef", None) or 0.0
        if not rate and section.balance == "aux_loss":
            raise setting_error(
                "model.balance", "aux_loss", "its config has no router_aux_loss_coef. Set model.balance_rate."
            )
        return float(rate)

    def prepare(self, folder: RunFolder, *, packs: bool) -> None:
        """Check the model folder's weights, and that the model supports the run's sequences.

        packs: True if a sequence can contain several documents.

        Raises:
            CheckpointError: if the weights cannot be read, or do not fit the model's config.
            ConfigError: if the folder is missing and needed, sequences are longer than the model supports, or its
                attention does not separate packed documents.
        """
        model = self.shapes()
        if self.needs_weights and not self.path.is_dir():
            rule = "there is no such folder, and an adapter's checkpoints do not contain the base. Restore the folder."
            raise setting_error("model.path", self.config.model.path, rule)
        self.check_weights(folder)
        self.check_length(self.config.train.seq_len)
        if packs:
            refuse_mixed_documents(model, self.config)

    def keep(self, folder: RunFolder, data: PreparedData, notes: Sequence[str]) -> Mapping[str, str]:
        """Copy the tokenizer, and the model folder's files except weights, into the run folder.

        Return the content of data.json, by file name.
        """
        self.keep_copy(folder)
        return keep_files(folder, None, data, [*notes, *self.notes])

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return logits, (batch, time, vocabulary)."""
        return call_in_documents(model, batch).logits

    def flops_per_token(self) -> float:
        """Return the FLOPs of forward and backward per token. An untied embedding table is not counted."""
        model, config = self.shapes(), self.read_config().get_text_config(decoder=True)
        head = model.get_output_embeddings()
        own = sum(param.numel() for param in model.parameters())
        tied = head is None or head.weight is model.get_input_embeddings().weight
        table = 0 if tied or head is None else head.weight.numel()
        return flops_per_token(own - table, config.num_hidden_layers, config.hidden_size, self.config.train.seq_len)

    def describe(self) -> PlannedModel:
        """Describe the model from its config.json if the planner supports the family, or from a trace of it."""
        try:
            found = read_model(str(self.base / "config.json"))
        except ModelError:
            found = read_model(replace(describe_by_tracing(self.shapes()), name=self.name()))
        # Adapter targets are transformers' layer names, which the planner's description does not have.
        adapter = adapter_size(self.shapes(), self.config, found.shape.layers)
        return replace(found, name=self.name(), sample_unit="sequences", counted_adapter=adapter)

    def line(self) -> str:
        """Return the model's name and size."""
        return f"{self.name()}: {self.size()}"


class HeadedModel(FolderModel):
    """A Hugging Face model with a task head, which is initialized if the folder has none.

    Args:
        config: the run's config, with model.path.
        head: suffix of transformers' AutoModelFor class, and its name in messages.
        changes: returns the fields of the model's config that the task sets.
        new_head: True to ignore the folder's head and initialize a new one.
    """

    def __init__(
        self,
        config: RunConfig,
        head: tuple[str, str],
        changes: Callable[[], Mapping[str, Any]] = dict,
        *,
        new_head: bool = False,
    ):
        super().__init__(config)
        self._head, self._changes, self._new_head = head, changes, new_head
        #: Padding id of batches, once it is known.
        self.pad_id: int | None = None

    def build(self) -> nn.Module:
        config = self.read_config()
        for name, value in self._changed(config).items():
            setattr(config, name, value)
        model = hugging_face.headed_model(config, *self._head)
        if not self._head[0]:
            for name, param in model.named_parameters():
                if "pooler." in name:  # it is not called, and weight decay would shrink it
                    param.requires_grad_(False)
        return model

    def _changed(self, config: Any) -> dict[str, Any]:
        """Return the config fields that the task sets, and `pad_token_id` if the config's is not `pad_id`."""
        changes = dict(self._changes())
        if self.pad_id is not None and own_pad(config, self.pad_id + 1) != self.pad_id:
            changes["pad_token_id"] = self.pad_id
        return changes

    def source(self, model: nn.Module) -> tuple[StateSource, list[str]]:
        found, unexpected = source_with_head(
            model, self.path, self.config.seed, new_head=self._new_head, added=self.added_rows
        )
        return found, [*format_unexpected_keys(unexpected), *format_new_keys(found.new_names, self.config.seed)]

    def tokenizer(self, **options: Any) -> Any:
        """Return the folder's transformers tokenizer, with added tokens.

        options: arguments of from_pretrained.

        Raises DataError if transformers gives the added tokens other ids than Weft.
        """
        found = hugging_face.load_tokenizer(self.base, **options)
        if self.new_tokens:
            from tokenizers import AddedToken

            ids = entries_of(self.path, self.new_tokens)
            found.add_tokens([AddedToken(token, normalized=False) for token in self.new_tokens])
            if other := [token for token in self.new_tokens if found.convert_tokens_to_ids(token) != ids[token]]:
                rule = f"transformers adds tokens of its own to the tokenizer of {self.path}, which take these ids"
                remedy = "Save it with them: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                raise DataError(f"tokenizer.add_tokens={other[0]}: {rule}. {remedy}.")
        return found

    def labels(self) -> Mapping[Any, str] | None:
        """Return the class names in the folder's config, or None if it has no `id2label`."""
        return getattr(self.read_config(), "id2label", None)

    def tokenizer_digest(self) -> str:
        """Return a digest of the tokenizer's files and of the added tokens."""
        hasher, base = hashlib.blake2b(digest_size=16), self.base
        hasher.update("".join(f"\0{token}" for token in self.new_tokens).encode())
        for file in sorted({file for pattern in COMPANIONS for file in base.glob(pattern)}):
            if file.name.startswith(("tokenizer", "vocab", "merges", "special", "added", "spiece", "sentencepiece")):
                hasher.update(file.name.encode() + read_regular(file, base))
        return hasher.hexdigest()

    def keep(self, folder: RunFolder) -> None:
        """Copy the model folder's files except weights into the run folder, with the task's fields in config.json."""
        folder.path.mkdir(parents=True, exist_ok=True)
        self.keep_copy(folder)
        file = base_of(folder) / "config.json"
        fields = json.loads(file.read_text("utf-8"))
        fields["architectures"] = [type(self.shapes()).__name__]
        fields |= self._changed(hugging_face.load_model_config(self.path))  # the folder's config, not the changed one
        file.write_text(json.dumps(fields, indent=1) + "\n", "utf-8")

    def token_costs(self) -> TokenCosts:
        """Return the costs of attention and of all weights except embedding tables."""
        config = self.read_config()
        return TokenCosts.of(self.shapes(), config.num_hidden_layers, config.hidden_size)

    def describe(self, text_len: int, limits: Mapping[str, Limit]) -> PlannedModel:
        """Describe the model for the planner, from a trace with token ids as the only input.

        Args:
            text_len: tokens of a typical text of the task.
            limits: plan fields that the task limits, in addition to the model's limits.
        """
        traced = describe_by_tracing(self.shapes())
        if traced.reads_sequence:
            traced = replace(traced, default_seq_len=text_len)
        traced = replace(traced, name=self.name(), limits=tuple({**dict(traced.limits), **limits}.items()))
        adapter = adapter_size(self.shapes(), self.config, traced.num_layers)
        return replace(read_model(traced), counted_adapter=adapter)

    def line(self) -> str:
        """Return the model's name, class and size."""
        return f"{self.name()}: {type(self.shapes()).__name__}, {self.size()}"


def refuse_mixed_documents(model: nn.Module, config: RunConfig) -> None:
    """Check that a model's attention can separate packed documents, if the config packs and separates them.

    Raises:
        ConfigError: if it cannot.
    """
    data = config.data
    if data.borders and data.packing != "pad" and (why := why_documents_mix(model)):
        remedy = "Use data.packing=pad for one document a row, or data.borders=false if they may"
        raise setting_error("data.borders", "true", f"{why}. {remedy}.")


def own_pad(config: Any, rows: int) -> int | None:
    """Return the padding id of a transformers config, or None if it is missing or not below `rows`."""
    found = getattr(config.get_text_config(), "pad_token_id", None)
    return found if isinstance(found, int) and 0 <= found < rows else None


# Weights of a pretrained folder, with a new head if the folder lacks one. The head's values depend only on (seed,
# name).

#: Standard deviation that `initialise_parameter` uses by default.
_USUAL_STD = 0.02


def source_with_head(
    model: Any, folder: Path, seed: int, *, new_head: bool = False, added: Path | None = None
) -> tuple[WeightsWithHead, list[str]]:
    """Return an object that reads a model's tensors, and the stored names that the model lacks.

    Tensors of the head and the pooler may be missing from the files, or have another shape there.

    Args:
        model: a transformers model on the meta device.
        folder: config.json and safetensors files.
        seed: seed of new tensors.
        new_head: if True, ignore the head in the files.
        added: file of rows to append to the folder's embeddings, or None.

    Raises:
        CheckpointError: if files or other tensors are missing, damaged or do not fit the model.
    """
    body = f"{model.base_model_prefix}."
    has_body = any(name.startswith(body) for name in model.state_dict())

    def may_lack(name: str) -> bool:
        return "pooler." in name or (has_body and not name.startswith(body))

    stored, unexpected = pretrained_source(model, folder, may_lack, added)
    if new_head:
        heads = [name for name in stored.entries if has_body and not name.startswith(body)]
        stored = stored.without(heads)
        unexpected = sorted([*unexpected, *heads])
    return WeightsWithHead(stored, model, seed), unexpected


class WeightsWithHead:
    """Reads slices of a model's tensors from files. Parameters that the files lack are initialized from (seed, name).

    Args:
        stored: tensors of the files.
        model: the unsharded model, with parameters on the meta device. Buffers that the files lack keep its values. The
            object does not keep a reference to it.
        seed: seed of new parameters.
    """

    def __init__(self, stored: JoinedTensors, model: nn.Module, seed: int):
        self._stored, self._seed = stored, seed
        # Read the state dict here, while the model is unsharded.
        state: Mapping[str, Any] = model.state_dict(keep_vars=True)
        config = getattr(model, "config", None)
        self._std = float(getattr(config, "initializer_range", None) or _USUAL_STD)
        formats = {torch_dtype: name for name, torch_dtype in torch_formats().items()}
        self._made = {
            name: _MadeTensor(
                one.shape, formats[one.dtype], None if one.is_parameter else state[name].detach().cpu().numpy()
            )
            for name, one in originals_of(model).items()
            if one.first == name and name not in stored.entries
        }
        self.entries: Mapping[str, Any] = {**stored.entries, **self._made}

    @property
    def new_names(self) -> list[str]:
        """The names of tensors that the files lack."""
        return sorted(self._made)

    @property
    def num_bytes_read(self) -> int:
        """Bytes of tensors read from files so far."""
        return self._stored.num_bytes_read

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Fill `out` with elements of a flattened part.

        Args:
            name: name of the tensor.
            part: selects elements of the full tensor.
            start: first element to read, as an index into the flattened part.
            out: filled to its end, in the dtype of the entry.

        Raises:
            CheckpointError: if bytes of the files are missing or cannot be read.
        """
        if name not in self._made:
            self._stored.read(name, part, start, out)
            return
        copy_part(self._compute_full(name), part, start, out)

    def _compute_full(self, name: str) -> np.ndarray:
        """Return all values of a new tensor. They are computed for each slice that is read, because heads are small."""
        made = self._made[name]
        if made.value is not None:
            return made.value
        found = torch.empty(made.shape, dtype=torch_formats()[made.dtype])
        if found.ndim == 1 and name.endswith("weight"):  # a norm's weight, of any class
            found.fill_(1.0)
        elif found.ndim == 1:
            found.zero_()
        else:
            initialise_parameter(found, name, nn.Module(), self._seed)
            found.mul_(self._std / _USUAL_STD)
        return found.numpy()


@dataclass(frozen=True, slots=True)
class _MadeTensor:
    """A tensor that the files lack. value: its values if it is a buffer, None for a parameter."""

    shape: tuple[int, ...]
    dtype: str
    value: np.ndarray | None
