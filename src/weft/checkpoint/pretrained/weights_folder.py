"""Which tensors a folder of safetensors files has: from the headers alone, with every file checked for its end."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.checkpoint import strict_json
from weft.checkpoint.arrays import RangedTensors
from weft.checkpoint.manifest import FileEntry, TensorEntry
from weft.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
#: An index of a million tensors has about 100 MB.
_MAX_INDEX_BYTES = 2**29
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What lies in a folder: tensors by their names in the files, and the files with their sizes."""

    folder: Path
    entries: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]


def no_folder(folder: Path) -> str:
    """Return what to say where model.path is no folder, as where it is the name of a model to download."""
    is_name = len(folder.parts) == 2 and not folder.is_absolute() and not folder.parent.is_dir()
    fetch = f" Weft downloads nothing: type hf download {folder} --local-dir {folder} first." if is_name else ""
    remedy = fetch or " Give a Hugging Face model's: config.json, safetensors weights, tokenizer."
    return f"model.path={folder}: there is no such folder.{remedy}"


def stored_weights(folder: Path) -> StoredWeights:
    """Read the headers of a folder's weights: one safetensors file, or several with an index.

    Args:
        folder: of a Hugging Face model.

    Raises:
        CheckpointError: names the file or the tensor that is missing, cut off, damaged or not what the index says, and
            what to do about weights in pickles.
    """
    if not folder.is_dir():
        raise CheckpointError(no_folder(folder))
    if (folder / _INDEX).is_file():
        place = _index(folder / _INDEX)
    elif (folder / _SINGLE).is_file():
        place = None
    else:
        raise CheckpointError(_no_weights(folder))
    found: dict[str, TensorEntry] = {}
    sizes: dict[str, FileEntry] = {}
    for name in sorted(set(place.values())) if place is not None else [_SINGLE]:
        try:
            size = _size(folder / name)
            tensors = RangedTensors(folder / name, size).tensors
        except FileNotFoundError:
            raise CheckpointError(
                f"model.path={folder}: {_INDEX} names {name}, which is missing. Download the folder again."
            ) from None
        except (CheckpointError, OSError) as error:
            raise CheckpointError(f"model.path={folder}: {error}. Download {name} again.") from error
        sizes[name] = FileEntry(size, "")
        for key, one in tensors.items():
            if place is None or place.get(key) == name:
                found[key] = TensorEntry(name, one.dtype, one.shape)
    for key, name in (place or {}).items():
        if key not in found:
            raise CheckpointError(
                f"model.path={folder}: {_INDEX} says that {name} has tensor {key[:200]!r}, and it does not. "
                "Download the folder again."
            )
    return StoredWeights(folder, found, sizes)


def _index(file: Path) -> dict[str, str]:
    try:
        if _size(file) > _MAX_INDEX_BYTES:
            raise ValueError(f"it has more than {_MAX_INDEX_BYTES} bytes")
        read: Any = strict_json.decode(file.read_bytes(), file.name)
        place = read.get("weight_map") if isinstance(read, dict) else None
        if not isinstance(place, dict) or not all(_is_file_name(name) for name in place.values()):
            raise ValueError("weight_map is not a table of file names")
        return place
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(
            f"model.path={file.parent}: {file.name} cannot be read ({error}). Download it again."
        ) from error


def _is_file_name(name: Any) -> bool:
    is_text = isinstance(name, str) and name.isprintable() and len(name) < 256
    return is_text and name.endswith(".safetensors") and name == Path(name).name


def _size(file: Path) -> int:
    """The bytes of a regular file. CheckpointError for a pipe, a device and the like."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{file.name} is not a regular file")
    return found.st_size


def _no_weights(folder: Path) -> str:
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        out = shlex.quote(f"{folder}-safetensors")
        return (
            f"model.path={folder}: its weights are pickles ({pickles[0]}), which can run code when they are read. "
            f"Type weft ckpt convert {shlex.quote(str(folder))} {out}, which reads them in a confined process, and "
            "give that folder."
        )
    return f"model.path={folder}: it has neither {_SINGLE} nor {_INDEX}. Give a folder with safetensors weights."
