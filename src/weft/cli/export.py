"""`weft export` and `weft ckpt convert`: full weights as safetensors, or as a folder that transformers loads."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.checkpoint.load import Checkpoint
from weft.checkpoint.safetensors_files import RawArray, write_blocks
from weft.errors import CheckpointError, ConfigError, MissingExtra
from weft.files import copy_companions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from weft.train.folder import RunFolder

#: Maximum size of a file of weights. Larger models are split, as Hugging Face does.
MAX_FILE_BYTES = 4 * 2**30
DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
_TORCH_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


#: Formats of weights in a GGUF file.
GGUF_DTYPES = (*DTYPES, "q8_0")


def expect_format(dtype: str | None, formats: Iterable[str] = DTYPES) -> None:
    """Raise ConfigError for a `--dtype` that is not in `formats`."""
    if dtype is not None and dtype not in formats:
        hint = " With --gguf FILE, also q8_0." if dtype == "q8_0" else ""
        raise ConfigError(f"--dtype {dtype}: not a format for weights. Use {', '.join(formats)}.{hint}")


def export_weights(
    checkpoint: Checkpoint,
    out: Path,
    *,
    group: str = "model",
    dtype: str | None = None,
    like: Path | None = None,
    run: RunFolder | None = None,
    merged: bool = False,
) -> list[Path]:
    """Write a group's full tensors into a new folder, which is renamed to `out` when complete. Return its files.

    Args:
        checkpoint: an open checkpoint.
        out: output folder.
        group: group of the checkpoint.
        dtype: key of DTYPES to convert floating-point tensors to, or None to keep their dtype.
        like: Hugging Face folder whose form, config and tokenizer the output gets.
        run: a `weft train` run whose model transformers supports. The output is then a folder that transformers loads.
        merged: whether to merge an adapter into its base model.

    Raises:
        ConfigError, CheckpointError, MissingExtra: if the weights cannot be exported this way.
    """
    if group not in checkpoint.groups:
        checkpoint.tensors(group)  # raises an error that lists the groups
    adapter = checkpoint.state.get("adapter") if group == "model" else None
    if merged and (adapter is None or run is None):
        what = "this checkpoint has a full model. Leave --merge out"
        other = "the base is known for runs of weft train alone. Use --like with the folder of the base"
        raise ConfigError(f"--merge: {what if adapter is None else other}.")
    with _new_folder(out) as draft:
        if adapter is not None and like is None and not merged:
            _write_adapter(checkpoint, adapter, draft, dtype, run)
        elif like is not None:
            _write_pretrained(checkpoint, group, draft, dtype, like)
        elif run is not None:
            from weft.train.tasks.export import exported_tensors, write_companions

            tensors = exported_tensors(run, checkpoint, merged=merged, widened=dtype is not None)
            written = write_files(tensors, "model", draft, dtype)
            write_companions(run, checkpoint, draft, written)
        else:
            entries = checkpoint.entries(group)
            names = [name for name, entry in entries.items() if entry.same_as is None]
            write_files(((name, checkpoint.block(f"{group}/{name}")) for name in names), group, draft, dtype)
            tied = {name: entry.same_as for name, entry in entries.items() if entry.same_as is not None}
            if tied:
                (draft / "shared_names.json").write_text(json.dumps(tied, indent=1) + "\n")
    return sorted(out.iterdir())


@contextmanager
def _new_folder(out: Path) -> Generator[Path]:
    """Yield a temporary folder that is renamed to `out` after the block.

    Raise ConfigError if `out` is not empty, and CheckpointError if it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"OUT={out}: the folder exists, and Weft does not overwrite it. Give another name, or delete it."
        )
    with _draft_folder(out, "OUT") as work:
        draft = work / "out"
        draft.mkdir()
        yield draft
        if out.exists():
            out.rmdir()
        os.rename(draft, out)


@contextmanager
def _draft_folder(out: Path, field: str) -> Generator[Path]:
    """Yield a temporary folder next to `out`. Raise CheckpointError if it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".weft-export-") as work:
            yield Path(work)
    except OSError as error:
        raise CheckpointError(f"{field}={out}: it cannot be written ({error.strerror}). Give another name.") from error


def write_files(tensors: Iterable[tuple[str, RawArray]], stem: str, out: Path, dtype: str | None) -> str:
    """Write files with Hugging Face's names, with an index if there are several.

    Return the safetensors dtype of the first written tensor, or "" without tensors.

    Args:
        tensors: names and tensors in order. Those of one file are in memory at the same time.
        stem: start of the file names.
        out: output folder.
        dtype: key of DTYPES to convert to, or None to keep the tensors' dtypes.
    """
    drafts: list[tuple[Path, list[str], int]] = []
    held: dict[str, RawArray] = {}
    first = ""

    def flush() -> None:
        if held:
            file = out / f".{len(drafts)}.safetensors"
            write_blocks(file, held)
            drafts.append((file, [*held], sum(one.data.nbytes for one in held.values())))
            held.clear()

    for name, block in tensors:
        block = converted(block, dtype)
        first = first or block.dtype
        if held and sum(one.data.nbytes for one in held.values()) + block.data.nbytes > MAX_FILE_BYTES:
            flush()
        held[name] = block
    flush()
    where: dict[str, str] = {}
    for number, (file, names, _) in enumerate(drafts, start=1):
        last = f"{stem}.safetensors" if len(drafts) == 1 else f"{stem}-{number:05d}-of-{len(drafts):05d}.safetensors"
        file.rename(out / last)
        where |= dict.fromkeys(names, last)
    if len(drafts) > 1:
        index = {"metadata": {"total_size": sum(size for _, _, size in drafts)}, "weight_map": where}
        (out / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return first


def converted(block: RawArray, dtype: str | None) -> RawArray:
    """Return an F64, F32, F16 or BF16 tensor converted to `dtype`, or unchanged if `dtype` is None.

    Tensors of other dtypes are unchanged.
    """
    wanted = None if dtype is None else DTYPES[dtype]
    if wanted is None or wanted == block.dtype or block.dtype not in ("F64", "F32", "F16", "BF16"):
        return block
    import numpy as np

    values = block.values().astype(np.float32)
    if wanted != "BF16":
        return RawArray.of(values.astype({"F32": np.float32, "F16": np.float16}[wanted]))
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0  # rounding the bits could turn a nan into an infinity
    plain = RawArray.of(np.ascontiguousarray(rounded))
    return RawArray("BF16", block.shape, plain.data)


def _write_pretrained(checkpoint: Checkpoint, group: str, out: Path, dtype: str | None, like: Path) -> None:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "hf", "--like") from error
    from weft.train.script.script_export import pretrained_from_full

    adapter = checkpoint.state.get("adapter") if group == "model" else None
    if not (like / "config.json").is_file():
        raise ConfigError(f"--like {like}: it has no config.json. Give the folder of the Hugging Face model.")
    try:
        config = transformers.AutoConfig.from_pretrained(like, local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0])
        if adapter is not None:
            model = kind.from_pretrained(like, local_files_only=True)
        else:
            with torch.device("meta"):
                model = kind(config) if hasattr(kind, "config_class") else kind.from_config(config)
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(
            f"--like {like}: transformers cannot build its model ({error}). Give another folder."
        ) from error
    wanted = None if dtype is None else getattr(torch, _TORCH_DTYPES[dtype])
    whole = _merged_into(model, checkpoint, adapter) if adapter is not None else checkpoint.tensors(group)
    pretrained_from_full(model, whole, out, wanted)
    copy_companions(like, out, overwrite=False)


def export_gguf(
    checkpoint: Checkpoint,
    file: Path,
    *,
    dtype: str | None = None,
    like: Path | None = None,
    run: RunFolder | None = None,
    merged: bool = False,
    checks: bool = True,
) -> str:
    """Write the checkpoint's model to a GGUF file, and return its dtype and the result of the greedy check.

    Args:
        checkpoint, dtype, like, run, merged: as in `export_weights`; `dtype` is one of GGUF_DTYPES.
        file: output file.
        checks: if True, transformers reads the file back, and its greedy tokens are compared.

    Raises:
        ConfigError, CheckpointError, MissingExtra, ModelError: if the model cannot be exported to GGUF.
    """
    if file.exists():
        raise ConfigError(f"--gguf {file}: the file exists, and Weft does not overwrite it. Give another name.")
    if "adapter" in checkpoint.state and like is None and not merged:
        raise ConfigError("--gguf: this checkpoint has an adapter alone. Add --merge to write the full model.")
    if run is None and like is None:
        raise ConfigError(
            "--gguf: only runs of weft train are known to transformers. Add --like FOLDER for its config."
        )
    try:
        from weft.train.weights.gguf_file import compare_greedy, expect_family, write_gguf
    except ImportError as error:
        raise MissingExtra(error.name or "gguf", "gguf", "--gguf") from error
    from weft.train.weights.decoder_files import base_of

    config = (base_of(run) if run is not None else like or Path()) / "config.json"
    if config.is_file():  # before the weights are written; Weft's decoders have none
        expect_family(json.loads(config.read_text("utf-8")).get("model_type", ""))
    with _draft_folder(file, "--gguf") as work:
        weights, draft = work / "weights", work / "model.gguf"
        export_weights(checkpoint, weights, dtype=dtype and "fp32", like=like, run=run, merged=merged)
        saved = {theirs: ours for ours, theirs in _TORCH_DTYPES.items()}
        dtype = dtype or saved.get(json.loads((weights / "config.json").read_text("utf-8")).get("dtype"), "fp32")
        write_gguf(weights, draft, dtype, file.stem)
        line = "greedy check: left out"
        if checks:
            equal, total = compare_greedy(weights, draft, dtype)
            line = f"greedy check: {equal} of {total} tokens equal those of the exported weights"
        os.rename(draft, file)
    return f"{dtype}; {line}"


# Adapters in peft's format, or merged into the Hugging Face model that they were trained on.


def _write_adapter(
    checkpoint: Checkpoint, said: Mapping[str, Any], out: Path, dtype: str | None, run: RunFolder | None = None
) -> None:
    import torch

    from weft.models.adapters import Adapted
    from weft.models.peft_files import write_adapter

    tensors, record = checkpoint.tensors("model"), Adapted.read(said)
    if more := sorted(tensors.keys() - record.tensor_names()):
        raise CheckpointError(
            f"tensor {more[0]!r}: it was trained in addition to the adapter, and files of an adapter cannot hold it. "
            "Use --merge, or --like with the folder of the base, to write both as one model."
        )
    if dtype is not None:
        tensors = {name: tensor.to(getattr(torch, _TORCH_DTYPES[dtype])) for name, tensor in tensors.items()}
    if run is None:
        write_adapter(record, out, tensors)
        return
    from weft.config.sections import TRAINS
    from weft.train.tasks.export import base_name, resized_weights, write_card
    from weft.train.weights.decoder_files import base_of

    base, resized, config = base_name(run), resized_weights(run), run.config()
    is_causal = base is not None and TRAINS.get(config.task.name or "", "decoder") == "decoder"
    task_type = "CAUSAL_LM" if is_causal else None
    write_adapter(record, out, tensors, base=base, task_type=task_type, resized=resized)
    if config.tokenizer.add_tokens or resized:  # the base's own tokenizer lacks the new tokens
        copy_companions(base_of(run), out, overwrite=False)
        for name in ("config.json", "generation_config.json"):
            (out / name).unlink(missing_ok=True)
    write_card(run, checkpoint, out)


def _merged_into(model: nn.Module, checkpoint: Checkpoint, said: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Merge an adapter into its base `model`, which is changed, and return the model's tensors without duplicates.

    Raises:
        CheckpointError: if the model is not the base that the adapter was trained on.
    """
    from weft.models.adapters import Adapted, adapt_layers, merge_adapter, train_more
    from weft.models.token_rows import find_rows
    from weft.train.states.model_state import model_tensors, restore_model

    record = Adapted.read(said)
    modules = dict(model.named_modules())
    # `restore_model` reports tensors that are missing from the model.
    adapt_layers(
        model, {path: modules[path] for path in record.layers if path in modules}, record.kind, 0, record.experts
    )
    train_more(model, {}, find_rows(model, {path: ids for path, ids in record.tokens.items() if path in modules}))
    for name, param in model.named_parameters():
        if name in checkpoint.entries("model"):
            param.requires_grad_(True)  # such as a norm that was trained with the adapter
    restore_model(model, checkpoint)
    return model_tensors(merge_adapter(model))


# `weft ckpt convert`: write a model folder with safetensors instead of pickles.


def convert_pickles(source: Path, out: Path, *, dtype: str | None, limit_s: float) -> tuple[list[Path], list[str]]:
    """Write pickled weights as safetensors into a new folder. Return its files and the skipped names.

    The folder is renamed to `out` when complete.

    Args:
        source: folder of a Hugging Face model.
        out: output folder.
        dtype: key of DTYPES to convert floating-point tensors to, or None to keep their dtype.
        limit_s: maximum time for reading in seconds.

    Raises:
        ConfigError, CheckpointError: if the source cannot be converted.
    """
    from weft.train.weights.foreign_checkpoint import pickled_weights

    with _new_folder(out) as draft:
        read = draft.with_name("read")
        read.mkdir()
        tensors, left_out = pickled_weights(source, read, limit_s)
        write_files(tensors, "model", draft, dtype)
        copy_companions(source, draft)
    return sorted(out.iterdir()), left_out
