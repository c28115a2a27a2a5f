"""Error messages for wrong config values, generated from the JSON schema of `RunConfig` or another section."""

from __future__ import annotations

import functools
import math
from typing import cast

from weft.config.parsing import KeyPath, as_toml, dotted, shown
from weft.config.plan import PLAN_FIELDS
from weft.config.run_config import RunConfig
from weft.config.sections import Section
from weft.errors import did_you_mean, nearest_name

_BATCH = "train.global_batch=N: samples of one optimizer step over all ranks and accumulation"
_PRECISION = "plan.precision=bf16 (or fp32, tf32, fp16, fp8, fp64)"

_ALIASES = {
    # Optimizer and schedule
    "optimizer.lr": "learning_rate max_lr max_learning_rate",
    "optimizer.name": "optim",
    "optimizer.eps": "adam_epsilon",
    "optimizer.betas": "adam_beta1 adam_beta2",
    "optimizer.max_grad_norm": "grad_clip clip_grad_norm gradient_clip_val gradient_clipping",
    "schedule.kind": "lr_scheduler lr_scheduler_type decay_lr",
    "schedule.warmup_steps": "warmup warmup_iters",
    "schedule.warmup_ratio": "warmup_ratio",
    "schedule.final": "min_lr",
    # Steps and batches
    "train.global_batch": "batch_size train_batch_size global_batch_size",
    _BATCH: "per_device_train_batch_size per_device_batch_size micro_batch_size micro_batch local_batch_size",
    "plan.accumulation": "gradient_accumulation_steps grad_accumulation_steps accumulate_grad_batches",
    "train.steps": "max_steps max_iters num_steps total_steps training_steps",
    "train.epochs": "num_epochs num_train_epochs max_epochs",
    "train.early_stop.patience": "early_stopping_patience",
    "train.seq_len": "sequence_length sequence_len max_seq_length max_length cutoff_len block_size context_length",
    "data.packing": "sample_packing",
    # Model and adapter
    "model.path": "model_name_or_path base_model pretrained_model_name_or_path",
    "model.num_layers": "n_layer n_layers",
    "model.num_heads": "n_head n_heads",
    "model.dim": "n_embd hidden_size",
    "adapter.rank": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.targets": "lora_target lora_target_modules target_modules",
    "adapter.kind": "peft_type",
    "adapter.base=nf4": "load_in_4bit",
    "adapter.base=int8": "load_in_8bit",
    # Data
    "data.train": "dataset datasets dataset_path train_file data_path",
    "data.eval": "validation_file",
    "data.holdout": "val_set_size val_size",
    "data.workers": "dataloader_num_workers num_workers",
    # Run, checkpoints, evaluation, logging
    "run.dir": "output_dir",
    "run.name": "run_name",
    "resume.step": "resume_from_checkpoint",
    "checkpoint.every": "save_steps save_interval",
    "checkpoint.keep": "save_total_limit",
    "eval.every": "eval_steps eval_interval evaluation_strategy",
    "log.every": "logging_steps log_freq",
    "sink": "report_to wandb_project",
    # Plan
    _PRECISION: "dtype torch_dtype mixed_precision",
    "plan.precision=bf16": "bf16",
    "plan.precision=fp16": "fp16",
    "plan.precision=tf32": "tf32",
    "plan.recompute=full": "gradient_checkpointing activation_checkpointing",
    "plan.compile=on": "torch_compile",
    "plan.zero=2 (`weft config import ds_config.json` translates a DeepSpeed config)": "deepspeed",
    "plan='dp_shard=* zero=3'": "fsdp",
    "plan='dp_shard=* zero=2'": "zero_stage",
    "plan.tp": "tensor_parallel_degree tensor_parallel_size",
    "plan.pp": "pipeline_parallel_degree",
    "plan.cp": "context_parallel_degree",
    "plan.ep": "expert_parallel_degree",
    "plan.sp": "sequence_parallel",
    "launch.ranks": "nproc_per_node num_processes",
    "launch.timeout": "ddp_timeout",
}
OTHER_NAMES = {name: setting for setting, names in _ALIASES.items() for name in names.split()}

#: Values that other tools use for a Weft setting, and the setting to write instead.
OTHER_VALUES = {
    "optimizer.name": {
        **dict.fromkeys(("paged_adamw_8bit", "adam8bit"), "optimizer.name=adamw_8bit"),
        **dict.fromkeys(("paged_adamw_32bit", "adamw_hf", "fused_adamw"), "optimizer.name=adamw"),
        **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "lion_8bit"), "optimizer.name=lion"),
        **{name: f"optimizer.name={name}" for name in ("adamw", "sgd", "muon", "lion", "adafactor", "soap", "shampoo")},
        "adam": "optimizer.name=torch.optim:Adam",
        "adagrad": "optimizer.name=torch.optim:Adagrad",
        "rmsprop": "optimizer.name=torch.optim:RMSprop",
    },
    "schedule.kind": {
        "constant_with_warmup": "schedule.kind=constant",
        "inverse_sqrt": "schedule.kind=cosine",
        "warmup_stable_decay": "schedule.kind=wsd",
    },
}


Node = dict[str, object]


@functools.cache
def _schema(root: type[Section]) -> Node:
    """Return the JSON schema of a section, without references to definitions."""
    schema = cast(Node, root.model_json_schema())
    definitions = cast(dict[str, Node], schema.pop("$defs", {}))
    return cast(Node, _resolved(schema, definitions))


def _resolved(node: object, definitions: dict[str, Node]) -> object:
    if isinstance(node, list):
        return [_resolved(one, definitions) for one in cast(list[object], node)]
    if not isinstance(node, dict):
        return node
    table = cast(Node, node)
    if isinstance(reference := table.get("$ref"), str):
        return _resolved(definitions[reference.rpartition("/")[2]], definitions)
    return {name: _resolved(one, definitions) for name, one in table.items()}


def keys_of(node: Node) -> dict[str, Node]:
    """Return the schemas of a table's keys by name; empty if the node is not a table with fixed keys."""
    return cast(dict[str, Node], node.get("properties", {}))


def node_at(path: KeyPath, root: type[Section] = RunConfig) -> Node | None:
    """Return the schema of the value at a path, or None for an unknown key."""
    node: Node | None = _schema(root)
    for part in path:
        node = _child(node, part)
        if node is None:
            return None
    return node


def _child(node: Node, part: str | int) -> Node | None:
    if isinstance(part, str):
        names = cast(dict[str, list[str]], node.get("propertyNames", {})).get("enum", [part])
        more = node.get("additionalProperties")
        return keys_of(node).get(part) or (cast(Node, more) if isinstance(more, dict) and part in names else None)
    elements = cast(list[Node], node.get("prefixItems", []))
    if part < len(elements):
        return elements[part]
    return cast(Node | None, node.get("items"))


def types_of(node: Node | None) -> list[object]:
    """Return the JSON types that a key's schema accepts, without null. None means an unknown type."""
    return [branch.get("type") for branch in _branches(node or {})]


def wrong_value(path: KeyPath, value: object, root: type[Section] = RunConfig) -> str:
    """Return the message for a value that its key does not accept, or for the key if it is unknown."""
    node = node_at(path, root)
    if node is None:
        return unknown_key(path, root)
    # "0.1" in quotes must not look like the number 0.1.
    is_quoted = isinstance(value, str) and _unquoted(value, _branches(node)) != ""
    is_secret = any(bool(branch.get("x-secret")) for branch in _branches(node))
    text = "***" if is_secret else f'"{value}"' if is_quoted else shown(value)
    kinds = " or ".join(_kind(branch) for branch in _branches(node))
    return f"{dotted(path)}={text}: {kinds} is needed. {_remedy(path, node, value)}"


def unknown_key(path: KeyPath, root: type[Section] = RunConfig) -> str:
    """Return the message for a key that does not exist."""
    parent, name = path[:-1], str(path[-1])
    text = f"unknown key {shown(dotted(path), 120)!r}."
    node = node_at(parent, root) or {}
    names = cast(dict[str, list[str]], node.get("propertyNames", {})).get("enum", [])
    siblings = [*keys_of(node), *names]
    near = nearest_name(name, siblings)
    meant = dotted((*parent, near)) if near else ""
    if not meant and root is RunConfig:  # a key of another section or another tool
        sections = reversed(keys_of(_schema(root)).items())
        meanings = {key: f"{section}.{key}" for section, node in sections for key in keys_of(node)} | OTHER_NAMES
        meant = f"plan.{name}" if name in PLAN_FIELDS else meanings.get(nearest_name(name.lower(), meanings), "")
    if meant:
        return f"{text} Write {meant}." if "=" in meant else f"{text} Did you mean '{meant}'?"
    table = f"[{dotted(parent)}]" if parent else "A config"
    return f"{text} {table} has {', '.join(siblings)}."


def _branches(node: Node) -> list[Node]:
    """Return the alternative schemas of a key's value, without null."""
    options = cast(list[Node], node.get("anyOf", [node]))
    return [option for option in options if option.get("type") != "null"]


def _kind(node: Node) -> str:
    if "x-rule" in node:
        return str(node["x-rule"])
    names = _names(node)
    if names:
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    elements = cast(list[Node], node.get("prefixItems", []))
    match node.get("type"):
        case "integer":
            return f"a whole number {_range(node, whole=True)}"
        case "number":
            return f"a number {_range(node, whole=False)}".rstrip()
        case "boolean":
            return "true or false"
        case "array" if elements:
            return f"a list of {len(elements)} values, each {_kind(elements[0])},"
        case "array" if not _has_tables(node):
            return f"a list of values, each {_kind(cast(Node, node.get('items', {})))},"
        case "array":
            return "a list of at least one table" if node.get("minItems") else "a list of tables"
        case "object":
            return "a table"
        case _:
            return "a string"


def _has_tables(node: Node) -> bool:
    """Return True if the elements of a list are tables."""
    return cast(Node, node.get("items", {})).get("type") == "object"


def _names(node: Node) -> list[str]:
    if "const" in node:
        return [str(node["const"])]
    return cast(list[str], node.get("enum", []))


def _range(node: Node, *, whole: bool) -> str:
    low, above = node.get("minimum"), node.get("exclusiveMinimum")
    high, below = node.get("maximum"), node.get("exclusiveMaximum")
    start = f"above {_plain(above)}" if above is not None else f"from {_plain(low)}"
    if whole and above is not None:
        start = f"from {int(cast(float, above)) + 1}"
    if high is not None:
        return f"{start} to {_plain(high)}"
    if below is not None:
        return f"{start} and below {_plain(below)}"
    return start if above is not None or low is not None else ""


def _plain(number: object) -> str:
    if number in (2**63 - 1, 2**63):
        return "2**63 - 1"
    return f"{number:.12g}" if isinstance(number, float) else str(number)


def _remedy(path: KeyPath, node: Node, value: object) -> str:
    key = dotted(path)
    names = [name for branch in _branches(node) for name in _names(branch)]
    if isinstance(value, str):
        meant = OTHER_VALUES.get(key, {}).get(value.lower())
        if meant:
            return f"Write {meant}."
        if hint := did_you_mean(value, names):
            return hint.strip()
        if names and "integer" not in types_of(node):
            return f"Use {key}={names[0]}."
        if unquoted := _unquoted(value, _branches(node)):
            return f"Write it without quotes: {path[-1]} = {unquoted}."
    if isinstance(value, float) and not math.isfinite(value):
        return f"Use a finite number, e.g. {key}={_example(path, node)}."
    match node.get("type"):
        case "object" if isinstance(path[-1], int):
            return f"Write [[{dotted(path[:-1])}]] and below it {first_line(path)}."
        case "object":
            inside = next(iter(keys_of(node)), "key")
            return f"Write its keys below a line [{key}], or {key}.{inside}=..."
        case "array" if "prefixItems" not in node and not _has_tables(node):
            return f"Use e.g. {key}={shown([value])}."
        case "array" if "prefixItems" not in node:
            return f"Write [[{key}]] and below it {first_line((*path, 0))}."
        case _:
            return f"Use e.g. {key}={_example(path, node)}."


def first_line(table: KeyPath, name: str = "") -> str:
    """Return an example line of TOML for the key `name` of a table, by default the table's first required key."""
    node = node_at(table) or {}
    name = name or cast(list[str], node.get("required", ["key"]))[0]
    examples = cast(list[object], keys_of(node).get(name, {}).get("examples", ["..."]))
    return f"{name} = {as_toml(examples[0])}"


def _unquoted(value: str, branches: list[Node]) -> str:
    """Return the text without quotes if a number or a boolean was probably meant, else ""."""
    text = value.strip().lower()
    if len(text) > 40 or not text.isprintable():
        return ""
    kinds = {str(branch.get("type")) for branch in branches}
    if "boolean" in kinds and text in ("true", "false"):
        return text
    try:
        number = float(text)
    except ValueError:
        return ""
    if "number" in kinds and math.isfinite(number):
        return text
    return text if "integer" in kinds and text.isascii() and text.isdigit() else ""


def _example(path: KeyPath, node: Node) -> str:
    if examples := cast(list[object], node.get("examples")):
        return as_toml(examples[0])
    default = node.get("default")
    if default is not None:
        return shown(default)
    if isinstance(path[-1], int):
        return _example((*path[:-1], "element"), {**node, "default": 0.9}) if node.get("type") == "number" else "..."
    kind = _branches(node)[0]
    if names := _names(kind):
        return names[0]
    return {"integer": "8", "number": "0.5", "boolean": "true"}.get(str(kind.get("type")), '"..."')
