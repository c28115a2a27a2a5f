"""A run of `weft train` as a folder that transformers loads: what is written, tensor by tensor."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoint import Checkpoint
from weft.checkpoint.arrays import RawArray, block_of, tensor_of
from weft.data import Tokenizer
from weft.files import copy_companions
from weft.models.adapters import Adapted
from weft.train.folder import RunFolder
from weft.train.tasks.decoder_files import base_of, data_of, decoder_of, tokenizer_of
from weft.train.tasks.task_choice import find_task
from weft.train.tasks.transformers_layout import layout_config, layout_tensors, write_tokenizer

if TYPE_CHECKING:
    import torch

_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}


def is_exportable(folder: RunFolder) -> bool:
    """Return whether a folder is of a run whose model transformers knows."""
    return base_of(folder).is_dir() or (folder.path / "model.json").is_file()


def exported_tensors(
    folder: RunFolder, checkpoint: Checkpoint, *, merged: bool = False, widened: bool = False
) -> Iterator[tuple[str, RawArray]]:
    """Yield the weights under transformers' names, one tensor at a time in memory.

    Args:
        folder: of the run.
        checkpoint: of any plan.
        merged: the checkpoint holds an adapter, which is to be added to its base.
        widened: whether weights with an adapter added keep the adapter's format; else they are rounded to the base's.

    Raises:
        CheckpointError: where the base is not the one that the adapter was trained on.
        ConfigError: where the base is not there any more.
    """
    from weft.train.tasks.merged_export import base_folder, merged_base, merged_decoder

    if not base_of(folder).is_dir():
        whole = merged_decoder(folder, checkpoint) if merged else None

        def read(name: str) -> RawArray:
            return checkpoint.block(f"model/{name}") if whole is None else block_of(whole[name])

        yield from layout_tensors(decoder_of(folder), read)
        return
    model = shapes_of(folder)
    if merged:
        whole = merged_base(model, base_folder(folder), checkpoint, widened=widened)
        yield from as_published(model, whole.names, whole.read)
        return
    names = [name for name, entry in checkpoint.entries("model").items() if entry.same_as is None]
    yield from as_published(model, names, lambda name: tensor_of(checkpoint.block(f"model/{name}")))


def shapes_of(folder: RunFolder) -> Any:
    """Return the model of a run on a pretrained folder, as its task builds it, without values."""
    task = find_task(folder.config())
    task.open(folder)
    return task.shapes()


def as_published(
    model: Any, names: Sequence[str], read: Callable[[str], torch.Tensor]
) -> Iterator[tuple[str, RawArray]]:
    """Yield a model's tensors under the names of published files, as transformers would save them.

    Args:
        model: of transformers, as shapes.
        names: of its tensors.
        read: gives one of them; only those that are stored as one are in memory at once.
    """
    try:
        core: Any = importlib.import_module("transformers.core_model_loading")
        groups = _stored_together(model, names, core)
    except (ImportError, AttributeError):  # releases before 5 save names as they are
        yield from ((name, block_of(read(name))) for name in names)
        return
    for each in groups:
        for target, tensor in core.revert_weight_conversion(model, {name: read(name) for name in each}).items():
            yield target, block_of(tensor.contiguous())


def _stored_together(model: Any, names: Sequence[str], core: Any) -> list[list[str]]:
    """Names of tensors in the groups that transformers joins when it saves them."""
    tables: Any = importlib.import_module("transformers.conversion_mapping")
    # What transformers notes on a model that it loads: it looks it up again for each call otherwise.
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


def write_beside(folder: RunFolder, checkpoint: Checkpoint, out: Path, dtype: str) -> None:
    """Write config, generation config, tokenizer and model card.

    Args:
        folder: of the run.
        checkpoint: whose weights stand beside them.
        out: the folder of the export.
        dtype: of the weights, as safetensors names it.
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
    """Write a README.md that says of a run's model what it was trained from, on what, how and how far.

    Args:
        folder: of the run.
        checkpoint: that is exported.
        out: the folder of the export.
    """
    (out / "README.md").write_text(_card(folder, checkpoint))


def _card(folder: RunFolder, checkpoint: Checkpoint) -> str:
    config = folder.config()
    source = config.model.path or config.model.name
    figures = _last_figures(folder, checkpoint.step)
    adapter = checkpoint.state.get("adapter")
    lines = [
        f"# {config.run.name}", "",
        f"`{Path(source).name if config.model.path else source}`, "
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
    """Return what a run's folder says of its data, a line for each part."""
    if (folder.path / "data.json").is_file():
        return data_of(folder).summary
    task = find_task(folder.config())
    task.open(folder)
    return task.data_lines()


def _last_figures(folder: RunFolder, step: int) -> dict[str, str]:
    """The newest losses that the events tell of up to a step."""
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
