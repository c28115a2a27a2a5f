"""Export of runs to transformers: decoders as Llama and GPT-2, merged adapters, tokenizers and model cards."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from weft.checkpoint.load import Checkpoint
from weft.checkpoint.pretrained import JoinedTensors
from weft.checkpoint.safetensors_files import RawArray, block_of, tensor_of
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.hugging_face_config import config_of_decoder
from weft.data.text.tokenizer import Tokenizer
from weft.errors import ConfigError, ModelError
from weft.files import copy_companions
from weft.hub import is_hub_text, local_folder, parse
from weft.models.adapters import Adapted, merge_adapter, merged_weight
from weft.models.adapters_experts import merge_stack, stack_names
from weft.models.quantized_linear import BASE_FORMATS
from weft.models.token_rows import TOKEN_ROWS, with_rows
from weft.parallel.state.flat_slices import read_full
from weft.train.folder import RunFolder
from weft.train.states.model_state import expect_same_base, model_tensors, restore_model
from weft.train.tasks.registry import find_task
from weft.train.weights.decoder_files import base_of, data_of, decoder_of, tokenizer_of
from weft.train.weights.published_weights import ADDED_ROWS, ADDED_SUFFIX, pretrained_source
from weft.train.weights.run_adapter import with_adapter

_LLAMA = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj", "attn.o": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
_GPT2 = {"norm1": "ln_1", "norm2": "ln_2", "attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
#: Weft's default chat template, for tokenizers without one.
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Reads a tensor of a checkpoint by its name.
Read = Callable[[str], RawArray]


def layout_config(spec: DecoderSpec, end_id: int, pad_id: int) -> dict[str, Any]:
    """Return the config.json of a decoder.

    Raises:
        ModelError: for a decoder with experts, which no transformers family computes like Weft.
    """
    if spec.num_experts:
        raise ModelError(
            "weft export: transformers has no family with the experts of Weft's decoders. Add --own-names for "
            "safetensors under Weft's names."
        )
    return {**config_of_decoder(spec), "bos_token_id": None, "eos_token_id": end_id, "pad_token_id": pad_id}


def _llama(spec: DecoderSpec, read: Read) -> Iterator[tuple[str, RawArray]]:
    yield "model.embed_tokens.weight", read("embed.weight")
    for layer in range(spec.num_layers):
        for ours, theirs in _LLAMA.items():
            yield f"model.layers.{layer}.{theirs}.weight", read(f"blocks.{layer}.{ours}.weight")
    yield "model.norm.weight", read("norm.weight")
    if not spec.tied:
        yield "lm_head.weight", read("head.weight")


def _gpt2(spec: DecoderSpec, read: Read) -> Iterator[tuple[str, RawArray]]:
    """Yield GPT-2's tensors. Its matrices are (inputs, outputs), and query, key and value are one matrix."""
    yield "transformer.wte.weight", read("embed.weight")
    yield "transformer.wpe.weight", read("pos_embed.weight")
    for layer in range(spec.num_layers):
        for kind in ("weight", "bias"):
            block, there = f"blocks.{layer}", f"transformer.h.{layer}"
            for ours, theirs in _GPT2.items():
                yield f"{there}.{theirs}.{kind}", _turned([read(f"{block}.{ours}.{kind}")])
            yield f"{there}.attn.c_attn.{kind}", _turned([read(f"{block}.attn.{name}.{kind}") for name in "qkv"])
    for kind in ("weight", "bias"):
        yield f"transformer.ln_f.{kind}", read(f"norm.{kind}")
    if not spec.tied:
        yield "lm_head.weight", read("head.weight")


def _turned(blocks: list[RawArray]) -> RawArray:
    """Return the weights of several layers, concatenated along outputs and transposed to (inputs, outputs)."""
    joined = np.ascontiguousarray(np.concatenate([block.array() for block in blocks]).T)
    return RawArray(blocks[0].dtype, tuple(joined.shape), joined.reshape(-1).view(np.uint8).data)


def write_tokenizer(source: Path, out: Path) -> None:
    """Write a run's tokenizer in transformers' format.

    source: the run's tokenizer folder. out: the folder to write to.
    """
    tokenizer = Tokenizer.load(source)
    text = tokenizer.library_json()
    (out / "tokenizer.json").write_text(text, "utf-8")
    from tokenizers import Tokenizer as Library

    library = Library.from_str(text)
    said: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": library.id_to_token(tokenizer.end_id),
        "pad_token": library.id_to_token(tokenizer.pad_id),
        "clean_up_tokenization_spaces": False,
    }
    begin = "".join(library.id_to_token(token) or "" for token in tokenizer.vocabulary.begin_ids)
    if len(tokenizer.vocabulary.begin_ids) == 1:
        said |= {"bos_token": begin, "add_bos_token": True}
    elif not begin and library.post_processor is not None:  # data.bos=false may have turned it off
        said |= {"add_bos_token": False}
    if tokenizer.vocabulary.turn_start_id >= 0:
        said["chat_template"] = begin + _CHATML
    (out / "tokenizer_config.json").write_text(json.dumps(said, indent=1) + "\n")


# A run with an adapter as a full model: the base's weights one by one, with the adapter merged.


class MergedBase:
    """Tensors of a folder's model with an adapter merged, read one at a time.

    Args:
        source: the folder's weights by the model's names.
        checkpoint: the adapter's checkpoint.
        widened: if True, merged weights have the adapter's dtype, else the base's dtype.
    """

    def __init__(self, source: JoinedTensors, checkpoint: Checkpoint, *, widened: bool):
        said: Mapping[str, Any] = checkpoint.state["adapter"]
        self.names = list(source.entries)
        self._source, self._widened, self._path = source, widened, checkpoint.path
        self._trained, self._digests = checkpoint.tensors("model"), said["base"]
        self._record = Adapted.read(said)
        self._own: dict[str, dict[str, str]] = {}
        for path, name in self._record.params():
            self._own.setdefault(f"{path}.weight", {})[name] = f"{path}.{name}"

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, with the adapter merged.

        Raises:
            CheckpointError: if the adapter was trained on a different base.
        """
        if name in self._trained:  # for example a norm that was trained with the adapter
            return self._trained[name]
        stored, path = read_full(self._source, name), name.removesuffix(".weight")
        if name in self._record.packed_weights():
            # The adapter was trained on dequantized values, not on the folder's values.
            kept = BASE_FORMATS[self._record.base]
            packed = kept.pack(stored)
            expect_same_base(name, packed, self._digests, self._path)
            stored = kept.unpack(packed, stored.shape[-1], stored.dtype)
        else:
            expect_same_base(name, stored, self._digests, self._path)
        if name in self._record.experts:
            ends = [end for _, end in stack_names({name: False}, self._record.kind.kind)]
            own = {end: self._trained[f"{name}{end}"] for end in ends}
            scale, is_transposed = self._record.kind.scale, self._record.experts[name]
            return merge_stack(scale, self._wide(stored, own["_lora_A"]), own, is_transposed)
        if path in self._record.tokens:
            rows = self._trained[f"{path}.{TOKEN_ROWS}"]
            return with_rows(self._wide(stored, rows), self._record.tokens[path], rows)
        if name not in self._own:
            return stored
        parts = {kind: self._trained[full] for kind, full in self._own[name].items()}
        return merged_weight(self._record, path, self._wide(stored, parts["lora_A"]), parts)

    def _wide(self, stored: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
        return stored.to(torch.promote_types(stored.dtype, trained.dtype)) if self._widened else stored


def merged_decoder(folder: RunFolder, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return the tensors of one of Weft's decoders, initialized from the run's seed, with its adapter merged."""
    from weft.models.registry import build_decoder

    config = folder.config()
    model = with_adapter(build_decoder(decoder_of(folder), seed=config.seed), config)
    restore_model(model, checkpoint)
    return model_tensors(merge_adapter(model))


def base_folder(folder: RunFolder) -> Path:
    """Return the folder of the base model of a run's adapter.

    Raises:
        ConfigError: if it no longer exists.
    """
    path = local_folder(folder.config().model.path)
    if not path.is_dir():
        raise ConfigError(
            f"--merge: the adapter's base, model.path={path}, does not exist. Restore the folder, or set its new "
            "path with --like instead of --merge."
        )
    return path


def base_name(folder: RunFolder) -> str | None:
    """Return the hub name or the folder of an adapter's base, for adapter_config.json.

    Return None if the base is one of Weft's decoders.
    """
    if not base_of(folder).is_dir():
        return None
    text = folder.config().model.path
    if is_hub_text(text):
        return parse(text, "model", "model.path").repo
    path = Path(text).expanduser()
    return str(path.resolve() if path.is_dir() else path)


def resized_weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    """Return the initial weights of a run's embeddings with added rows, by module path, or {} if no rows were added.

    Raises:
        ConfigError: if the base no longer exists.
    """
    if not (base_of(folder) / ADDED_ROWS).is_file():
        return {}
    task = find_task(folder.config())
    task.open(folder)
    file = base_of(folder) / ADDED_ROWS
    names = [name.removesuffix(ADDED_SUFFIX) for name in load_file(file)]
    names = [name for name in names if name.endswith(".weight")]
    # The base need not have a new head.
    source, _ = pretrained_source(task.shapes(), base_folder(folder), lambda name: name not in names, added=file)
    return {name.removesuffix(".weight"): read_full(source, name) for name in names}


# Export of a run of `weft train` to a folder that transformers loads, tensor by tensor.

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def is_exportable(folder: RunFolder) -> bool:
    """Return True if a folder is a run whose model transformers supports."""
    return base_of(folder).is_dir() or (folder.path / "model.json").is_file()


def exported_tensors(
    folder: RunFolder, checkpoint: Checkpoint, *, merged: bool = False, widened: bool = False
) -> Iterator[tuple[str, RawArray]]:
    """Yield the weights under transformers' names, one tensor at a time in memory.

    Args:
        folder: run folder.
        checkpoint: a checkpoint of any plan.
        merged: if True, the checkpoint contains an adapter, which is merged into its base.
        widened: if True, merged weights have the adapter's dtype, else the base's dtype.

    Raises:
        CheckpointError: if the adapter was trained on a different base.
        ConfigError: if the base no longer exists.
    """

    if not base_of(folder).is_dir():
        whole = merged_decoder(folder, checkpoint) if merged else None

        def read(name: str) -> RawArray:
            return checkpoint.block(f"model/{name}") if whole is None else block_of(whole[name])

        spec = decoder_of(folder)
        yield from (_gpt2 if spec.family == "gpt2" else _llama)(spec, read)
        return
    task = find_task(folder.config())
    task.open(folder)
    model = task.shapes()
    if merged:
        source, _ = pretrained_source(model, base_folder(folder), added=base_of(folder) / ADDED_ROWS)
        whole = MergedBase(source, checkpoint, widened=widened)
        yield from as_published(model, whole.names, whole.read)
        return
    names = [name for name, entry in checkpoint.entries("model").items() if entry.same_as is None]
    yield from as_published(model, names, lambda name: tensor_of(checkpoint.block(f"model/{name}")))


def as_published(
    model: Any, names: Sequence[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, RawArray]]:
    """Yield a model's tensors with the names under which transformers saves them.

    Args:
        model: a transformers model on the meta device.
        names: names of its tensors.
        read: function that returns a tensor by name. Only tensors that transformers saves as one are in memory
            together.
    """
    try:
        core: Any = importlib.import_module("transformers.core_model_loading")
        groups = _stored_groups(model, names, core)
    except (ImportError, AttributeError):  # releases before 5 save names as they are
        yield from ((name, block_of(read(name))) for name in names)
        return
    for each in groups:
        for target, tensor in core.revert_weight_conversion(model, {name: read(name) for name in each}).items():
            yield target, block_of(tensor.contiguous())


def _stored_groups(model: Any, names: Sequence[str], core: Any) -> list[list[str]]:
    """Return groups of tensor names that transformers joins when it saves them.

    Sets the attribute `_weight_conversions` of the model.
    """
    tables: Any = importlib.import_module("transformers.conversion_mapping")
    # transformers sets this attribute on a loaded model. Set it here, or each call would compute it again.
    used = tables.get_model_conversion_mapping(model, add_legacy=False)
    kept = [one for one in used if not isinstance(one, core.PrefixChange)]
    setattr(model, "_weight_conversions", kept or None)  # noqa: B010
    back = [one.reverse_transform() for one in reversed(kept)]
    converters = [one for one in back if isinstance(one, core.WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=core.dot_natural_key):
        target, pattern = core.apply_converters(name, converters)
        groups.setdefault(name if pattern is None else f"joined {target}", []).append(name)
    return list(groups.values())


def write_companions(folder: RunFolder, checkpoint: Checkpoint, out: Path, dtype: str) -> None:
    """Write config, generation config, tokenizer and model card.

    Args:
        folder: run folder.
        checkpoint: the exported checkpoint.
        out: the folder of the export.
        dtype: dtype of the weights, by its safetensors name.
    """
    if base_of(folder).is_dir():
        copy_companions(base_of(folder), out)
        config = json.loads((out / "config.json").read_text("utf-8"))
    else:
        tokenizer = Tokenizer.load(tokenizer_of(folder))
        config = layout_config(decoder_of(folder), tokenizer.end_id, tokenizer.pad_id)
        write_tokenizer(tokenizer_of(folder), out)
        said = {"eos_token_id": tokenizer.end_id, "pad_token_id": tokenizer.pad_id}
        (out / "generation_config.json").write_text(json.dumps(said, indent=1) + "\n")
    config.pop("torch_dtype", None)
    config["dtype"] = _DTYPES.get(dtype, "float32")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_card(folder, checkpoint, out)


def write_card(folder: RunFolder, checkpoint: Checkpoint, out: Path) -> None:
    """Write a README.md (model card) with the base, the data, the method and the length of training.

    Args:
        folder: run folder.
        checkpoint: the exported checkpoint.
        out: the folder of the export.
    """
    (out / "README.md").write_text(_card(folder, checkpoint))


def _card(folder: RunFolder, checkpoint: Checkpoint) -> str:
    config = folder.config()
    text = config.model.path
    source = parse(text, "model", "model.path").repo if is_hub_text(text) else Path(text).name or config.model.name
    figures = _last_figures(folder, checkpoint.step)
    adapter = checkpoint.state.get("adapter")
    lines = [
        f"# {config.run.name}", "",
        f"`{source}`, "
        f"{'fine-tuned' if config.model.path else 'trained'} with Weft.", "",
        "| | |", "|---|---|",
        f"| step | {checkpoint.step} of {config.train.steps} |",
        f"| plan | `{checkpoint.state.get('plan', '')}` |",
        f"| batch | {config.train.global_batch} sequences of {config.train.seq_len} tokens |",
        f"| optimizer | {config.optimizer.name}, lr {config.optimizer.lr:g} |",
        *([f"| adapter | {Adapted.read(adapter).kind} |"] if adapter else []),
        *(f"| {name} | {value} |" for name, value in figures.items()), "",
        "## Data", "", *(f"- {line}" for line in data_lines_of(folder)), "",
    ]  # fmt: skip
    return "\n".join(lines)


def data_lines_of(folder: RunFolder) -> Sequence[str]:
    """Return lines that describe the data of a run."""
    if (folder.path / "data.json").is_file():
        return data_of(folder).summary
    task = find_task(folder.config())
    task.open(folder)
    return task.data_lines()


def _last_figures(folder: RunFolder, step: int) -> dict[str, str]:
    found: dict[str, str] = {}
    if not folder.events.is_file():
        return found
    for line in folder.events.read_text("utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        is_new = isinstance(event, dict) and isinstance(event.get("loss"), int | float) and event.get("step", 0) <= step
        if is_new and event.get("event") in ("step", "eval"):
            found["training loss" if event["event"] == "step" else "evaluation loss"] = f"{event['loss']:.4f}"
    return found
