"""Rows that are added to a pretrained folder's embeddings for new tokens, and the tokenizer files with these tokens.

New rows follow transformers' `resize_token_embeddings(mean_resizing=True)`: they are drawn around the mean of the
folder's rows, with 1e-9 of their covariance. One process computes them once and writes a file, so they are equal on all
ranks. They depend only on (folder, seed, name).

Source: Hewitt 2021, "Initializing new word embeddings for pretrained language models".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.config.run_config import RunConfig
from weft.data.text.tokenizer import find_tokenizer_file, with_added_tokens
from weft.errors import ConfigError, Problem
from weft.models.initialize import normal_values
from weft.models.inspect import hugging_face
from weft.parallel.state.flat_slices import originals_of, read_full
from weft.train.weights.published_weights import ADDED_ROWS, ADDED_SUFFIX, pretrained_source

#: Share of the covariance of the folder's rows, as in transformers.
_SHARE = 1e-9
#: Rows that are converted to float64 at a time.
_AT_ONCE = 2**14


def number_of_rows(config: RunConfig, folder: Path) -> int | None:
    """Return the number of embedding rows after adding the config's rows to the embeddings of model.path.

    Return None if the config adds no rows.

    Raises:
        ConfigError: if model.vocab_size is less than the rows in the folder.
        DataError: if tokens are added, and the folder has no tokenizer.json or it has one of the tokens already.
    """
    asked, tokens = config.model.vocab_size, config.tokenizer.add_tokens
    if not (asked or tokens):
        return None
    stored = hugging_face.load_model_config(folder).get_text_config().vocab_size
    if asked is not None and asked < stored:
        rule = f"the embedding of model.path has {stored} rows, and rows are only added"
        raise ConfigError([Problem.of("model.vocab_size", asked, f"{rule}. Use {stored} or more, or leave it out.")])
    entries = max(entries_of(folder, tokens).values()) + 1 if tokens else 0
    rows = max(stored, asked or 0, entries)
    return rows if rows > stored else None


def entries_of(folder: Path, tokens: Sequence[str] = ()) -> dict[str, int]:
    """Return the ids of a folder's tokenizer by token, after adding tokens.

    Raises:
        DataError: if the folder has no tokenizer.json, or it has one of the tokens already.
    """
    from tokenizers import Tokenizer as Library

    text = find_tokenizer_file(str(folder)).read_text("utf-8")
    return Library.from_str(with_added_tokens(text, tokens)).get_vocab(with_added_tokens=True)


def write_added_rows(file: Path, model: nn.Module, stored: nn.Module, folder: Path, seed: int) -> None:
    """Compute the new rows of a model's embeddings, and write them to a safetensors file.

    A tensor in the file has the name of the embedding's tensor and the suffix `ADDED_SUFFIX`.

    Args:
        file: the file to write.
        model: the model with the added rows, on the meta device.
        stored: the model of the folder's config, on the meta device.
        folder: config.json and safetensors files.
        seed: seed of the new rows.

    Raises:
        ConfigError: if a tensor that is no embedding depends on the number of tokens.
        CheckpointError: if the folder's weights cannot be read, or do not fit its config.
    """
    wanted, before = originals_of(model), originals_of(stored)
    changed = {name for name, one in wanted.items() if one.first == name and one.shape != before[name].shape}
    read: Any = model
    tables: list[Any] = [read.get_input_embeddings(), read.get_output_embeddings()]
    own = {id(param) for table in tables if table is not None for param in table.parameters(recurse=False)}
    known = {name for name, param in model.named_parameters() if id(param) in own}
    if other := sorted(changed - known):
        rule = f"tensor {other[0]!r} of model.path has a row per token too, and only embeddings are resized"
        raise ConfigError(
            [Problem("model.vocab_size", f"model.vocab_size: {rule}. Resize the folder with transformers.")]
        )
    source, _ = pretrained_source(stored, folder, lambda name: name not in changed)
    found = {
        f"{name}{ADDED_SUFFIX}": drawn_rows(
            read_full(source, name), wanted[name].shape[0] - before[name].shape[0], name, seed
        )
        for name in sorted(changed & source.entries.keys())
    }
    save_file(found, file)


@torch.no_grad()
def drawn_rows(stored: Tensor, count: int, name: str, seed: int) -> Tensor:
    """Return new rows (count, ...) for a weight (V, D) or bias (V,), in its dtype.

    Rows of a weight are normal with the mean and 1e-9 of the covariance of the stored rows, or equal to the mean if the
    covariance is not positive definite. A bias has the mean and 1e-9 of the standard deviation.
    """
    flat = torch.cat(
        [values for _, values in normal_values(seed, f"{name}{ADDED_SUFFIX}", count * stored[0].numel())]
    ).double()
    if stored.ndim == 1:
        wide = stored.double()
        return (wide.mean() + _SHARE * wide.std() * flat).to(stored.dtype)
    blocks = stored.split(_AT_ONCE)
    mean_D = torch.stack([block.double().sum(0) for block in blocks]).sum(0) / len(stored)
    covariance_DD = torch.zeros(len(mean_D), len(mean_D), dtype=torch.float64)
    for block in blocks:
        centered_VD = block.double() - mean_D
        covariance_DD.addmm_(centered_VD.t(), centered_VD)
    root_DD, failed = torch.linalg.cholesky_ex(covariance_DD * (_SHARE / len(stored)))
    if failed:
        return mean_D.to(stored.dtype).repeat(count, 1)
    return (mean_D + flat.view(count, -1) @ root_DD.t()).to(stored.dtype)


def add_to_files(folder: Path, tokens: Sequence[str], rows: int | None, file: Path | None) -> None:
    """Change a copy of a folder's files: add tokens to tokenizer.json, set config.json's vocab_size, and copy `file`.

    Args:
        folder: the copy.
        tokens: tokens to add.
        rows: number of rows of the embeddings, or None for no change.
        file: file of `write_added_rows`, or None.
    """
    if tokens:
        text = (folder / "tokenizer.json").read_text("utf-8")
        (folder / "tokenizer.json").write_text(with_added_tokens(text, tokens), "utf-8")
    if rows is not None:
        config = hugging_face.load_model_config(folder)
        fields = json.loads((folder / "config.json").read_text("utf-8"))
        text_config = config.get_text_config()
        part = next((name for name in config.sub_configs if getattr(config, name, None) is text_config), None)
        (fields if part is None else fields.setdefault(part, {}))["vocab_size"] = rows
        (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n", "utf-8")
    if file is not None:
        (folder / ADDED_ROWS).write_bytes(file.read_bytes())
