"""What a frozen encoder makes of pictures or recordings, kept in shards of safetensors: made once, read by number.

A shard's name follows from the encoder, the settings and the origin of each of its items, so what is kept of other
weights, settings or records is never found. A file gets its name last, once all of it lies on the disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.mixed.mixed_records import MixedRecords
from weft.errors import DataError

#: Items of a shard, and shards that a process holds open.
_ITEMS, _OPEN = 256, 64
_VERSION = 1


class FeatureShards:
    """Rows that an encoder gives of items of one kind, (R, D) each.

    Args:
        folder: that keeps them.
        key: JSON values that say which encoder it is, and how items are seen or heard.
        records: the samples.
        is_sound: whether they are of recordings; else of pictures.
        blank: what stands in where a batch has none, (R, D).
    """

    def __init__(self, folder: Path, key: Sequence[Any], records: MixedRecords, *, is_sound: bool, blank: NDArray[Any]):
        self.folder, self.is_sound, self.blank = folder, is_sound, blank
        self._places: dict[int, int] = {}
        origins: list[str] = []
        item = 0
        for index, count in enumerate(records.num_media()):
            for number in range(int(count)):
                if records.sizes(index)[number][0] == is_sound:
                    self._places[item] = len(origins)
                    origins.append(json.dumps(records.origin(index, number)))
                item += 1
        #: Numbers of the items among all media of the samples.
        self.items = list(self._places)
        head = json.dumps([_VERSION, *key])
        self._names = [
            hashlib.blake2b("\n".join([head, *origins[first : first + _ITEMS]]).encode(), digest_size=16).hexdigest()
            for first in range(0, len(origins), _ITEMS)
        ]
        self._open: OrderedDict[int, tuple[NDArray[Any], NDArray[np.int64]]] = OrderedDict()

    def __len__(self) -> int:
        """Count the shards."""
        return len(self._names)

    def items_of(self, shard: int) -> list[int]:
        """Return the numbers of a shard's items, in order."""
        return self.items[shard * _ITEMS : (shard + 1) * _ITEMS]

    def path(self, shard: int) -> Path:
        """Return where a shard lies, or will."""
        return self.folder / f"{self._names[shard]}.safetensors"

    def has(self, shard: int) -> bool:
        """Return whether a shard is there, whole by its length."""
        return self._header(shard) is not None

    def write(self, shard: int, rows: Sequence[NDArray[Any]]) -> None:
        """Keep what the encoder gave of a shard's items.

        Args:
            shard: its number.
            rows: of each item, (R, D).

        Raises:
            DataError: where the folder does not take it.
        """
        from safetensors.numpy import save

        values = np.ascontiguousarray(np.concatenate(rows))
        counts = np.array([len(one) for one in rows], np.int64)
        data = save({"values": values, "counts": counts}, {"digest": _digest(values, counts)})
        path = self.path(shard)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                with open(draft, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, path)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(
                f"data.cache_features=true: {path} cannot be written ({error.strerror or error}). Make room, or name "
                "another folder with data.cache_dir."
            ) from error

    def __getitem__(self, item: int) -> NDArray[Any]:
        """Return the rows of an item by its number among all media, (R, D).

        Raises:
            DataError: where its shard is gone or damaged.
        """
        shard, number = divmod(self._places[item], _ITEMS)
        found = self._open.get(shard)
        if found is None:
            found = self._open[shard] = self._read(shard)
            if len(self._open) > _OPEN:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(shard)
        values, ends = found
        return values[ends[number] : ends[number + 1]]

    def _read(self, shard: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The values of a shard, mapped and not read, once their digest is right; and where each item's rows end."""
        path, header = self.path(shard), self._header(shard)
        if header is None:
            raise self._damaged(path)
        fields, first = header
        arrays = {}
        for name in ("values", "counts"):
            begin, _ = fields[name]["data_offsets"]
            shape = tuple(fields[name]["shape"])
            arrays[name] = np.memmap(path, _DTYPES[fields[name]["dtype"]], "r", first + begin, shape)
        values, counts = arrays["values"], np.array(arrays["counts"])
        if fields["__metadata__"].get("digest") != _digest(values, counts):
            raise self._damaged(path)
        return values, np.concatenate(([0], np.cumsum(counts)))

    def _header(self, shard: int) -> tuple[dict[str, Any], int] | None:
        """What the file says of itself, and where its numbers begin; None where it is not there, or cut off."""
        try:
            with open(self.path(shard), "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                fields = json.loads(file.read(size))
                whole = 8 + size + max(fields[name]["data_offsets"][1] for name in ("values", "counts"))
                return (fields, 8 + size) if os.fstat(file.fileno()).st_size == whole else None
        except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError, RecursionError):
            return None

    def _damaged(self, path: Path) -> DataError:
        return DataError(f"{path}: the kept features are gone or damaged. Delete the file: the next start makes it.")


_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U16": "<u2", "I64": "<i8"}


def _digest(values: NDArray[Any], counts: NDArray[np.int64]) -> str:
    hasher = hashlib.blake2b(counts.tobytes(), digest_size=16)
    if values.size:
        hasher.update(values.reshape(-1).view(np.uint8).data)
    return hasher.hexdigest()
