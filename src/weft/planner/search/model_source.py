"""Models from the command line: a named size, a Hugging Face config, or a Weft config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from weft.config.parsing import MODEL_CODE
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.hugging_face_config import read_numbers
from weft.config.shapes.model_spec import ModelSpec, decoder_spec, model_names
from weft.config.shapes.traced_model import FORMAT, Limit, TracedModel
from weft.errors import ModelError, did_you_mean
from weft.planner.cost.generation import CacheKind
from weft.planner.space.shape import Shape, TracedShape
from weft.planner.space.trained_part import AdapterSize, FrozenWork

if TYPE_CHECKING:
    from weft.config.run_config import RunConfig

#: Supported Hugging Face families, with True if their feed-forward layers have two up projections.
_FAMILIES = {
    "llama": True, "mistral": True, "mixtral": True, "qwen2": True, "qwen2_moe": True, "qwen3": True,
    "qwen3_moe": True, "gemma": True, "gemma2": True, "gemma3_text": True,
    "olmo": True, "olmo2": True, "phi3": True, "granite": True, "olmoe": True,
    "gpt_oss": True, "gpt2": False, "gpt_neox": False, "gpt_bigcode": False, "opt": False, "bloom": False,
    "deepseek_v2": True,
    "deepseek_v3": True,
}  # fmt: skip


class UnknownFamily(ModelError):
    """Raised for a config.json of a family that the planner does not support. Tracing the model works instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """Model to be planned.

    Attributes:
        spec: shape for plan rules.
        config: config of the run, if a config file was given.
        sample_unit: plural name of the batch's elements, if the model's task defines it.
        counted_adapter: size of the config's adapter, if the model's task counts it; None if the planner does.
        texts: number of sequences per sample.
        frozen: forwards of a step without gradients.
        task_limits: the task's limits for plans, in addition to the model's.
        folder: folder of a Hugging Face model.
        caches: caches of generated texts, if they were measured; (): the shape determines them.
        is_transposed: True if linear layers store weights as (inputs, outputs), which cannot be quantized in blocks.
    """

    name: str
    shape: Shape
    spec: DecoderSpec
    config: RunConfig | None = None
    sample_unit: str = "samples"
    counted_adapter: AdapterSize | None = None
    texts: int = 1
    frozen: FrozenWork | None = None
    task_limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    folder: Path | None = None
    caches: tuple[CacheKind, ...] = ()
    is_transposed: bool = False

    @property
    def traced(self) -> TracedModel | None:
        """Trace of the model, or None if the model was not traced."""
        return self.shape.traced if isinstance(self.shape, TracedShape) else None

    @property
    def adapter(self) -> AdapterSize | None:
        """Adapter of the config, or None if all weights are trained."""
        if self.config is None or self.counted_adapter is not None or not self.config.adapter.rank:
            return self.counted_adapter
        if self.traced is not None:
            return AdapterSize.of_traced(self.traced, self.config.adapter.rank, self.config.adapter.base)
        return AdapterSize.of(self.spec, self.config.adapter)

    @property
    def reads_sequence(self) -> bool:
        """True if the samples are sequences."""
        return self.traced is None or self.traced.reads_sequence

    @property
    def limits(self) -> Mapping[str, Limit]:
        """Limits for plans from the model's modules and its task."""
        return {**(dict(self.traced.limits) if self.traced else {}), **self.task_limits}

    def adapter_of(self, rank: int, base: str = "stored") -> AdapterSize:
        """Return the size of an adapter on all linear layers that may have one.

        Raises:
            ModelError: for a quantized base if the model's linear layers store transposed weights.
        """
        if self.is_transposed and base != "stored":
            rule = "its layers keep weights as (inputs, outputs), and blocks are of an output's inputs"
            raise ModelError(f"base={base}: {self.name}: {rule}. Use --tune lora, or base=stored in a config.")
        if self.traced is not None:
            return AdapterSize.of_traced(self.traced, rank, base)
        return AdapterSize.of_shape(self.shape, rank, base)


def read_model(source: str | ModelSpec | DecoderSpec | Shape | TracedModel | PlannedModel) -> PlannedModel:
    """Return the model that a text or a specification describes.

    Args:
        source: a size such as "llama3-8b"; a folder with a Hugging Face config.json, or that file; a Weft config
            (.toml); a traced model (.json); or a specification.

    Raises:
        ModelError: for an unknown name, an unreadable file, a model that must be traced first, or a specification
            without a shape.
        ConfigError: for a config that breaks rules.
    """
    if isinstance(source, PlannedModel):
        return source
    if isinstance(source, DecoderSpec):
        return of_decoder("decoder", source)
    if isinstance(source, TracedModel):
        return PlannedModel(name=source.name, shape=TracedShape.of(source), spec=TracedShape.as_rules_see_it(source))
    if isinstance(source, Shape):
        return PlannedModel(name="decoder", shape=source, spec=_as_decoder(source, 2**20))
    if isinstance(source, ModelSpec):
        if source.shape is None:
            rule = "only its parameters are known, not its shape. Use a size, a DecoderSpec or a config folder."
            raise ModelError(f"model={source.name}: {rule}")
        return of_decoder(source.name, source.shape)
    return _read_text(source)


def of_decoder(name: str, spec: DecoderSpec, config: RunConfig | None = None) -> PlannedModel:
    """Return one of Weft's decoders as a planned model."""
    return PlannedModel(name=name, shape=Shape.of_decoder(spec), spec=spec, config=config)


def _read_text(text: str) -> PlannedModel:
    path = Path(text)
    if text in model_names():
        return of_decoder(text, decoder_spec(text))
    if path.suffix == ".toml":
        return _read_run(path)
    if path.is_dir() or path.suffix == ".json":
        return _read_hugging_face(path)
    if MODEL_CODE.fullmatch(text):
        rule = "a model given as code must be traced first"
        raise ModelError(f"model={text}: {rule}. Give weft.trace({text!r}).")
    hint = did_you_mean(text, model_names()) or f" Sizes: {', '.join(model_names())}."
    raise ModelError(f"model={text}: neither a built-in size, nor a folder with a config.json, nor a .toml file.{hint}")


def _read_run(path: Path) -> PlannedModel:
    from weft.config.files import load_config
    from weft.config.rules.config_rules import least_vocab
    from weft.config.shapes.model_spec import resolve_decoder

    config = load_config(path, ["plan=auto"]).config
    if config.task.name is not None:
        rule = f"task.name={config.task.name} must be traced first"
        raise ModelError(f"model={path}: {rule}. Type weft plan {path} with a cluster.")
    return of_decoder(config.model.name, resolve_decoder(config.model, least_vocab(config)), config)


def _read_hugging_face(path: Path) -> PlannedModel:
    file = path if path.suffix == ".json" else path / "config.json"
    try:
        read: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model={path}: {file} cannot be read ({error.strerror}). Check the path.") from None
    except ValueError as error:
        raise ModelError(f"model={path}: {file} is not JSON ({error}). Give the config.json of a model.") from None
    if not isinstance(read, dict):
        raise ModelError(f"model={path}: {file} is not a JSON object. Give the config.json of a model.")
    table = cast(dict[str, Any], read)
    if table.get("format") == FORMAT:
        return read_model(TracedModel.from_table(str(path), table))
    name = path.parent.name if path.suffix == ".json" else path.name or str(path.resolve())
    return replace(_from_hugging_face(name, table), folder=file.parent)


def _from_hugging_face(name: str, table: Mapping[str, Any]) -> PlannedModel:
    family = table.get("model_type")
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UnknownFamily(
            f"model={name}: model_type={family} is not a family that the planner reads. "
            f"Known: {known}. Trace it: weft plan package.module:function, a function that "
            f"returns the model."
        )
    found = read_numbers(name, table)
    shape = _shape(str(family), table, found)
    spec = _as_decoder(shape, found.get("positions", 2**20))
    return PlannedModel(name=name, shape=shape, spec=spec, is_transposed=family == "gpt2")  # its layers are Conv1D


def _shape(family: str, table: Mapping[str, Any], found: Mapping[str, int]) -> Shape:
    experts = found.get("num_experts", 0)
    experts = experts if experts > 1 and found.get("top_k") else 0
    expert_ffn = found.get("expert_ffn", 0) if experts else 0
    shared = found.get("shared_ffn", table.get("n_shared_experts", 0) * expert_ffn) if experts else 0
    window = found.get("window", 0) if table.get("use_sliding_window", True) else 0
    kinds = table.get("layer_types") or ()
    windowed = sum(1 for kind in kinds if kind == "sliding_attention") if kinds else found["layers"]
    ffn = found.get("ffn") or 4 * found["hidden"]
    return Shape(
        vocab=found["vocab"],
        hidden=found["hidden"],
        layers=found["layers"],
        heads=found["heads"],
        kv_heads=found.get("kv_heads") or (1 if table.get("multi_query") else found["heads"]),
        head_dim=found.get("head_dim") or found["hidden"] // found["heads"],
        ffn=0 if experts and not found.get("dense_layers") else ffn,
        gated=_FAMILIES[family],
        tied=bool(
            table.get(
                "tie_word_embeddings", family.startswith("gemma") or family in ("gpt2", "opt", "bloom", "gpt_bigcode")
            )
        ),
        biases=not _FAMILIES[family],
        layer_norm=not _FAMILIES[family],
        learned_positions=found.get("positions", 0) if family in ("gpt2", "opt", "gpt_bigcode") else 0,
        num_experts=experts,
        top_k=found["top_k"] if experts else 0,
        expert_ffn=expert_ffn,
        shared_ffn=shared,
        dense_layers=found.get("dense_layers", 0) if experts else 0,
        window=window,
        windowed_layers=windowed if window else 0,
        **{name: found.get(name, 0) for name in ("q_rank", "kv_rank", "rope_dim") if found.get("kv_rank")},
    )


def _as_decoder(shape: Shape, positions: int) -> DecoderSpec:
    spec = DecoderSpec(
        family="llama" if shape.gated else "gpt2",
        vocab_size=shape.vocab,
        dim=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        ffn_dim=shape.ffn or shape.expert_ffn,
        max_seq_len=positions or 2**20,
        tied=shape.tied,
    )
    if not shape.num_experts:
        return spec
    return replace(
        spec,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        expert_ffn_dim=shape.expert_ffn,
        first_moe_layer=shape.dense_layers,
    )


def default_seq_len(model: PlannedModel) -> int:
    """Return the default tokens per sequence: the config's value, else the model's maximum, up to 8192.

    For a traced model it is the length of the example, if that has sequences, since train.seq_len is a setting of
    decoders.
    """
    if model.config and model.traced is None:
        return model.config.train.seq_len
    example = model.traced.default_seq_len if model.traced else 0
    return example or min(8192, model.spec.max_seq_len)


def default_batch(model: PlannedModel, seq_len: int, num_devices: int) -> int:
    """Return the default sequences per step: the config's value, else a usual number of tokens for the model's size.

    That is half a million tokens for small models, up to 16 million for the largest. The number of sequences is rounded
    down to a power of two, but is at least the number of devices if there are up to 64. Without sequences, it is eight
    samples per device, rounded up to a power of two, and at least 256.
    """
    if model.config:
        return model.config.train.global_batch
    if not model.reads_sequence:
        return max(256, 1 << (8 * num_devices - 1).bit_length())
    params = model.shape.num_params
    millions = next(
        tokens for limit, tokens in ((3e9, 0.5), (3e10, 1), (2e11, 4), (float("inf"), 16)) if params < limit
    )
    sequences = max(1, round(millions * 2**20 / seq_len))
    wanted = 1 << (sequences.bit_length() - 1)
    return max(wanted, num_devices) if num_devices <= 64 else wanted
