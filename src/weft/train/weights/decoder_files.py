"""Files of a text decoder in a run folder: model.json, data.json, the tokenizer, and a copy of model.path's files."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.data.store.prepared import PreparedData
from weft.errors import CheckpointError, DataError
from weft.files import copy_companions, copy_regular
from weft.train.folder import RunFolder, free_name


def decoder_of(folder: RunFolder) -> DecoderSpec:
    """Return the shape of the run's model."""
    return DecoderSpec(**json.loads(folder.text("model.json")))


def tokenizer_of(folder: RunFolder) -> Path:
    """Return the path of the run's copy of the tokenizer."""
    return folder.path / "tokenizer"


def base_of(folder: RunFolder) -> Path:
    """Return the path of the run's copy of a pretrained folder's config, tokenizer and chat template."""
    return folder.path / "base"


def keep_base(folder: RunFolder, source: Path, change: Callable[[Path], None] | None = None) -> None:
    """Copy a pretrained folder's files except weights into the run folder. Does nothing if it already has a copy.

    change: changes the copy before it gets its final name.

    Raises:
        CheckpointError: if a file is not a regular one, or is a link that leads outside the folder.
    """
    if base_of(folder).is_dir():
        return
    draft = folder.path / f".base.{os.getpid()}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        copy_companions(source, draft)
        if change is not None:
            change(draft)
    except CheckpointError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise CheckpointError(f"model.path={source}: {error}") from error
    os.rename(draft, base_of(folder))


def data_of(folder: RunFolder) -> PreparedData:
    """Return the run's tokenized data.

    Raises:
        DataError: if data.json is damaged.
    """
    try:
        return PreparedData.from_json(folder.text("data.json"))
    except DataError as error:
        file = folder.path / "data.json"
        raise DataError(
            f"{file}: {error}. Type rm {shlex.quote(str(file))} and repeat the weft train command, which rewrites it."
        ) from error


def keep_files(
    folder: RunFolder, spec: DecoderSpec | None, data: PreparedData, notes: Sequence[str]
) -> Mapping[str, str]:
    """Copy the tokenizer if the folder lacks it, and return the contents of model.json and data.json by file name.

    Args:
        folder: the run's folder.
        spec: shape of the model; None if a transformers config describes it, which needs no model.json.
        data: tokenized data.
        notes: lines about the data for users, which are stored with its summary.
    """
    if not tokenizer_of(folder).exists():
        _copy_tree(data.tokenizer_dir, tokenizer_of(folder))
    data = dataclasses.replace(data, summary=[*data.summary, *notes])
    shape = {} if spec is None else {"model.json": json.dumps(dataclasses.asdict(spec), indent=2) + "\n"}
    return {**shape, "data.json": data.to_json()}


def refuse_other_data(folder: RunFolder, data: PreparedData) -> None:
    """Check that tokenized data belongs to the run in `folder`.

    Raises:
        DataError: if it differs, with the difference.
    """
    changes = data.changes_from(data_of(folder))
    if changes:
        raise DataError(
            f"{'; '.join(changes)}. The run in {str(folder.path)!r} cannot continue with other data. Use "
            f"{free_name(folder)} for a new run, or bring the old data back to resume."
        )


def _copy_tree(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        shutil.copytree(
            source,
            draft,
            dirs_exist_ok=True,
            copy_function=lambda file, copy: copy_regular(Path(file), Path(copy), source),
        )
        draft.chmod(target.parent.stat().st_mode & 0o777)
    except CheckpointError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise DataError(f"tokenizer: {error}") from error
    try:
        os.rename(draft, target)
    except OSError as error:
        # Another rank has written it first, with the same content.
        shutil.rmtree(draft)
        if not target.is_dir():
            raise DataError(f"tokenizer: cannot copy {str(source)!r} to {str(target)!r} ({error.strerror}).") from error
