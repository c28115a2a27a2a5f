"""Adapters in peft's format: adapter_config.json and adapter_model.safetensors in one folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.errors import CheckpointError, ModelError
from weft.models.adapters import Adapted, adapt_layers, adapted, chosen_layers, train_more
from weft.models.adapters_experts import AdapterKind, stack_names, stack_shapes, stacked_parameters
from weft.models.inspect import layers
from weft.models.token_rows import TOKEN_ROWS, find_rows, saved_modules

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
#: Names of a layer's parameters in peft's format, by Weft's names.
_SUFFIXES = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", "lora_magnitude": "lora_magnitude_vector"}
#: End of the name of trained rows in peft's format.
_ROWS = ".token_adapter.trainable_tokens_delta"
#: Settings of unsupported adapters that change the layer's computation.
_UNKNOWN = (
    "alpha_pattern", "rank_pattern", "layer_replication", "lora_bias", "use_qalora", "use_bdlora", "arrow_config",
    "alora_invocation_tokens",
)  # fmt: skip


def save_adapter(
    model: nn.Module, folder: str | Path, tensors: Mapping[str, Tensor] | None = None, *, base: str | None = None
) -> None:
    """Write a model's adapter in peft's format. Call it on one process. Pass the full tensors of a parallelized model.

    Args:
        model: a model with an adapter.
        folder: created if missing. Existing adapter files are replaced.
        tensors: full tensors by the model's names, as returned by `run.full_state_dict(model)`. None for its own.
        base: name or folder of the model without the adapter, stored for readers of the files.

    Raises:
        ModelError: if the model has no adapter, trains parameters outside the adapter, or has DoRA on experts.
    """
    found = dict(model.named_parameters()) if tensors is None else tensors
    record = _expected(model)
    own = record.tensor_names()
    if more := [name for name, param in model.named_parameters() if param.requires_grad and name not in own]:
        raise ModelError(
            f"parameter {more[0]!r}: it is trained in addition to the adapter, and adapter files cannot contain it. "
            "Name its module in modules_to_save, or save the full model: run.save_pretrained, or merged_tensors."
        )
    buffers = dict(model.named_buffers())
    found = {**{name: buffers[name] for name in own & buffers.keys()}, **found}
    named = getattr(getattr(model, "config", None), "_name_or_path", None)
    task = "CAUSAL_LM" if hasattr(model, "generate") else None
    write_adapter(record, folder, found, base=base or named or None, task_type=task)


def write_adapter(
    record: Adapted,
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    *,
    base: str | None = None,
    task_type: str | None = None,
    resized: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter in peft's format without its model.

    Args:
        record: the record that `adapted` returns for the model.
        folder: see `save_adapter`.
        tensors: full tensors by the model's names. Tensors of the base model are ignored.
        base: see `save_adapter`.
        task_type: peft's name of the model's task.
        resized: weights of embeddings that have more rows than the base, by the path of their module. peft loads them
            into a base whose embeddings were resized.

    Raises:
        ModelError: for DoRA on experts, which peft's format does not have.
    """
    if record.experts and record.kind.kind == "dora":
        raise ModelError(
            f"kind=dora: peft has no format for magnitudes of {next(iter(record.experts))}. Write the merged model: "
            "weft export RUN OUT --merge, or run.save_pretrained."
        )
    own = dict(tensors)
    for path in record.experts:  # (E, R, inputs) becomes (E R, inputs), and (E, outputs, R) becomes (outputs, R E)
        own[f"{path}_lora_A"] = tensors[f"{path}_lora_A"].flatten(0, 1)
        own[f"{path}_lora_B"] = tensors[f"{path}_lora_B"].permute(1, 2, 0).flatten(1)
    whole = {theirs: own[ours].detach().cpu().clone().contiguous() for theirs, ours in _wanted(record).items()}
    for path, weight in (resized or {}).items():
        if path not in record.saved:
            inner = ".token_adapter.base_layer" if path in record.tokens else ""
            whole[f"{_PREFIX}{path}{inner}.weight"] = weight
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Write both new files before replacing the old ones.
    save_file(whole, folder / f"{TENSORS_FILE}.new", {"format": "pt"})
    (folder / f"{CONFIG_FILE}.new").write_text(json.dumps(_config(record, base, task_type), indent=2) + "\n")
    for name in (TENSORS_FILE, CONFIG_FILE):
        (folder / f"{name}.new").replace(folder / name)


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Load an adapter written by peft or `save_adapter` into a model in place.

    The model's layers are adapted as by `add_adapter`.

    Args:
        model: the base model of the adapter, unsharded on this process and not parallelized.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Returns:
        The same model.

    Raises:
        CheckpointError: if files are missing or damaged, or the adapter belongs to another model or is not supported.
        ModelError: see `add_adapter`.
    """
    folder = Path(folder)
    config, tensors = _read(folder)
    _refuse_unknown(folder, config)
    modules, usable = dict(model.named_modules()), chosen_layers(model, optional=True)
    saved, stacks = saved_modules(model, _saved_paths(folder, config, modules)), _target_stacks(folder, config, model)
    resized = _resized(model, tensors)
    other = [*_stack_prefixes(stacks).values(), *(f"{_PREFIX}{path}." for path in saved)]
    rest = [name for name in tensors if name not in resized and not name.endswith(_ROWS)]
    paths = {path for path, _ in _names_in(folder, [name for name in rest if not _is_of(name, other)])}
    for path in sorted(paths - usable.keys()):
        if path not in modules:
            raise CheckpointError(
                f"{folder}: an adapter of another model: it adapts {path!r}, which this model does not have. "
                "Give the base that the adapter was trained on."
            )
        raise CheckpointError(
            f"{folder}: it adapts {path!r} ({type(modules[path]).__name__}), which cannot have an adapter in Weft. "
            "Merge it with peft, and load the merged model."
        )
    kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    adapter = AdapterKind(config["r"], config["lora_alpha"], kind, float(config.get("lora_dropout", 0.0)))
    chosen = {path: layer for path, layer in usable.items() if path in paths}
    rows = find_rows(model, _tokens_of(config, tensors), saved)
    tokens = {path: one.ids for path, one in rows.items()}
    record = Adapted(adapter, dict.fromkeys(chosen, False), saved=saved, tokens=tokens, experts=stacks)
    # The model stays unchanged if a tensor does not fit.
    found = _checked(folder, tensors, _wanted(record) | resized, _shapes(model, record))
    adapt_layers(model, chosen, adapter, 0, stacks)
    train_more(model, saved, rows)
    own = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, tensor in found.items():
            own[name].copy_(tensor)
    return model


def adapter_values(model: nn.Module, folder: str | Path) -> dict[str, Tensor]:
    """Read an adapter in peft's format for a model that has one of the same kind. Return its tensors by our names.

    Args:
        model: the model with its adapter, unsharded, on any device. It is not changed.
        folder: folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        CheckpointError: if files are missing or damaged, or the adapter differs from the model's.
    """
    folder, record = Path(folder), _expected(model)
    config, tensors = _read(folder)
    _refuse_unknown(folder, config)
    kind = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    own = {"rank": record.kind.rank, "alpha": record.kind.alpha, "kind": record.kind.kind}
    for name, value in {"rank": config["r"], "alpha": config["lora_alpha"], "kind": kind}.items():
        if value != own[name]:
            raise CheckpointError(f"{folder}: its {name} is {value}, and {own[name]} is set. Use {name}={value}.")
    wanted, resized = _wanted(record), _resized(model, tensors)
    if odd := sorted(tensors.keys() - wanted.keys() - resized.keys()):
        raise CheckpointError(f"{folder}: {odd[0]!r} is of a layer without an adapter. Add the layer to targets.")
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise CheckpointError(f"{folder}: it has no {missing[0]!r}. Use the targets that it was trained on.")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    return _checked(folder, tensors, wanted, shapes)


def _shapes(model: nn.Module, record: Adapted) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a model's tensors will have with an adapter, by name."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    for path in record.layers:
        own = record.kind.shapes(*layers.weight_of(model.get_submodule(path)).shape)
        shapes |= {f"{path}.{name}": shape for name, shape in own.items()}
    for path, is_transposed in record.experts.items():
        own = stack_shapes(model.get_parameter(path), record.kind, is_transposed)
        shapes |= {f"{path}{end}": shape for end, shape in own.items()}
    rows = {f"{path}.{TOKEN_ROWS}": (len(ids), *shapes[f"{path}.weight"][1:]) for path, ids in record.tokens.items()}
    return shapes | rows


def _checked(
    folder: Path, tensors: Mapping[str, Tensor], names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Return the stored tensors in the model's layout, by its names.

    Args:
        folder: for error messages.
        tensors: stored tensors by peft's names.
        names: the model's name of each wanted tensor, by peft's name.
        shapes: shapes by the model's names.

    Raises:
        CheckpointError: if a tensor is missing or does not fit.
    """
    found: dict[str, Tensor] = {}
    stored_names = {ours for theirs, ours in names.items() if theirs in tensors}
    for theirs, ours in names.items():
        stored, shape = tensors.get(theirs), shapes[ours]
        if stored is None and ours in stored_names:  # tied modules may be saved once
            continue
        if stored is not None and len(shape) == 3 and stored.numel() == math.prod(shape):
            count, first, second = shape
            is_a = ours.endswith("_lora_A")
            stored = stored.view(count, first, second) if is_a else stored.view(first, second, count).permute(2, 0, 1)
        if stored is None or tuple(stored.shape) != shape:
            said = "is missing" if stored is None else f"has shape {tuple(stored.shape)}, not {shape}"
            raise CheckpointError(
                f"{folder}: tensor {theirs!r} {said}. Use the base that the adapter was trained on, and complete files."
            )
        found[ours] = stored
    return found


def _is_of(name: str, starts: Iterable[str]) -> bool:
    """Return True if a name begins with one of the prefixes `starts`, and its rest does not contain `base_layer`."""
    return any(name.startswith(start) and "base_layer" not in name.removeprefix(start) for start in starts)


def _resized(model: nn.Module, tensors: Iterable[str]) -> dict[str, str]:
    """Return, by peft's name, the model's name of each full weight of an embedding or output layer in `tensors`.

    peft saves these weights if they have more rows than the base's.
    """
    tables = (layers.input_embeddings(model), layers.find_lm_head(model))
    full = {f"{path}.weight" for path, one in model.named_modules() if any(one is table for table in tables)}
    names = {name: name.removeprefix(_PREFIX).replace(".token_adapter.base_layer", "") for name in tensors}
    return {name: ours for name, ours in names.items() if ours in full}


def _tokens_of(config: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    """Return the ids of trained tokens by module, and replace rows in `tensors` by rows sorted by id.

    Raises CheckpointError if the config names tokens and `tensors` has no rows.
    """
    asked: Any = config.get("trainable_token_indices") or {}
    tokens: dict[str, list[int]] = {}
    for name in [name for name in tensors if name.endswith(_ROWS)]:
        path = name.removeprefix(_PREFIX).removesuffix(_ROWS)
        ends = [end for end in asked if f".{path}".endswith(f".{end}")] if isinstance(asked, dict) else []
        ids = tokens[path] = list(asked[ends[0]] if ends else asked if isinstance(asked, list) else [])
        if len(ids) == tensors[name].shape[0]:
            tensors[name] = tensors[name][sorted(range(len(ids)), key=ids.__getitem__)]
    if asked and not tokens:
        raise CheckpointError(f"{CONFIG_FILE}: trainable_token_indices has no rows in {TENSORS_FILE}. Copy both again.")
    return tokens


def _wanted(record: Adapted) -> dict[str, str]:
    """Return the model's name of each tensor of an adapter, by peft's name."""
    layers = {f"{_PREFIX}{path}.{_SUFFIXES[name]}": f"{path}.{name}" for path, name in record.params()}
    rows = {f"{_PREFIX}{path}{_ROWS}": f"{path}.{TOKEN_ROWS}" for path in record.tokens}
    saved = {f"{_PREFIX}{path}.{name}": full for path, names in record.saved.items() for name, full in names.items()}
    prefixes = _stack_prefixes(record.experts)
    stacks = {
        f"{prefixes[path]}{end.removeprefix('_')}.weight": f"{path}{end}"
        for path, end in stack_names(record.experts, record.kind.kind)
    }
    return layers | stacks | rows | saved


def _stack_prefixes(stacks: Mapping[str, bool]) -> dict[str, str]:
    """Return, by stack, the prefix of its tensors' names in peft's files.

    peft wraps a module once for each adapted parameter. So the names of all but the last contain `base_layer.`, once
    per outer wrapper.
    """
    modules: dict[str, list[str]] = {}
    for path in stacks:
        modules.setdefault(path.rpartition(".")[0], []).append(path)
    return {
        path: f"{_PREFIX}{module}.{'base_layer.' * (len(paths) - 1 - place)}"
        for module, paths in modules.items()
        for place, path in enumerate(paths)
    }


def _target_stacks(folder: Path, config: Mapping[str, Any], model: nn.Module) -> dict[str, bool]:
    """Return the stacks of experts that peft's `target_parameters` names, as `chosen_stacks` does.

    Raises CheckpointError if a name matches no stack.
    """
    asked, found = config.get("target_parameters") or [], dict[str, bool]()
    for path, (module, _) in stacked_parameters(model).items():
        if any(path == one or path.endswith(f".{one}") for one in asked):
            found[path] = bool(getattr(module, "is_transposed", False))
    if unknown := [one for one in asked if not any(path == one or path.endswith(f".{one}") for path in found)]:
        raise CheckpointError(
            f"{folder}: it adapts the parameter {unknown[0]!r}, which is no weight of stacked experts of this model. "
            "Merge it with peft, and load the merged model."
        )
    return found


def _saved_paths(folder: Path, config: Mapping[str, Any], modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the paths of the modules that peft's `modules_to_save` names by the ends of paths.

    Raises CheckpointError if another module shares their weights, unless the config has `ensure_weight_tying`.
    """
    asked = config.get("modules_to_save") or []
    found = [path for path in modules if path and any(path.endswith(end) for end in asked)]
    if config.get("ensure_weight_tying"):
        return found
    weights = {id(param) for path in found for param in modules[path].parameters()}
    for path, module in modules.items():
        shares = any(id(param) in weights for param in module.parameters(recurse=False))
        if shares and not any(f"{path}.".startswith(f"{one}.") for one in found):
            raise CheckpointError(
                f"{folder}: modules_to_save has {found[0]!r}, and the model's {path!r} shares its weight but is not "
                "trained. Merge the adapter with peft."
            )
    return found


def _expected(model: nn.Module) -> Adapted:
    record = adapted(model)
    if record is None:
        raise ModelError(f"model of type {type(model).__name__}: it has no adapter. Call add_adapter first.")
    return record


def _config(record: Adapted, base: str | None, task_type: str | None) -> dict[str, Any]:
    kind, stored = record.kind, [name for saved in record.saved.values() for name in saved.values()]
    names = {path.rpartition(".")[2] for path in record.saved}
    return {
        "peft_type": "LORA",
        "task_type": task_type,
        "base_model_name_or_path": base,
        "r": kind.rank,
        "lora_alpha": kind.alpha,
        "lora_dropout": kind.dropout,
        "use_rslora": kind.kind == "rslora",
        "use_dora": kind.kind == "dora",
        "target_modules": list(record.layers),
        "target_parameters": list(record.experts) or None,
        "modules_to_save": list(record.saved) or None,
        "ensure_weight_tying": len(set(stored)) < len(stored) and not names.isdisjoint(("embed_tokens", "lm_head")),
        "trainable_token_indices": {path: list(ids) for path, ids in record.tokens.items()} or None,
        "fan_in_fan_out": any(record.layers.values()),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    for name in (CONFIG_FILE, TENSORS_FILE):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: it holds no {name}. Give the folder of an adapter in peft's format.")
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG_FILE}: it is no adapter's config ({error}). Copy it again.") from error
    try:
        tensors = load_file(folder / TENSORS_FILE)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{folder / TENSORS_FILE}: damaged ({error}). Copy it again.") from error
    return {**config, "r": rank, "lora_alpha": alpha}, tensors


def _refuse_unknown(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{folder}: an adapter of type {config.get('peft_type')}. Weft reads LORA, with rsLoRA and DoRA."
        )
    for name in _UNKNOWN:
        if config.get(name):
            raise CheckpointError(f"{folder}: {name} is set, which Weft does not read. Merge the adapter with peft.")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder}: it trains biases, which Weft does not read. Merge the adapter with peft.")


def _names_in(folder: Path, tensors: Iterable[str]) -> Iterator[tuple[str, str]]:
    for full in sorted(tensors):
        found = next((name for name, suffix in _SUFFIXES.items() if full.endswith(f".{suffix}")), None)
        if found is None or not full.startswith(_PREFIX):
            raise CheckpointError(
                f"{folder}: tensor {full!r} does not belong to an adapter on linear layers. Use peft to load it."
            )
        yield full.removeprefix(_PREFIX).removesuffix(f".{_SUFFIXES[found]}"), found
