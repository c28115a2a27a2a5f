"""Conversations as model inputs. Decode processes read images and audio clips and run the folder's processor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.chat_records import ChatRecords
from weft.data.media.folder_processor import FolderProcessor, pack, unpack
from weft.data.media.mixed_items import MixedAhead, MixedItems


class ChatItems(MixedItems):
    """Images and audio clips of conversations, by item index, as packed inputs of the model.

    Args:
        records: the conversations.
        processor: processor of the model's folder.
    """

    smaller = "max_pixels"

    def __init__(self, records: ChatRecords, processor: FolderProcessor):  # pyright: ignore[reportMissingSuperCall]
        self.records, self.processor = records, processor
        self._count_items()
        #: Largest size of an item in bytes.
        self.shape = (max(1, records.most_bytes()),)

    def shaped(self, item: int, values: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the packed inputs of an item."""
        return values

    def medium(self, epoch: int, item: int) -> NDArray[Any]:
        """Return the packed inputs of an item, which are equal in every epoch: uint8 (B,)."""
        index, number = self.locate(item)
        is_sound, size = self.records.sizes(index)[number]
        made = self.processor.read(self.records.medium(index, number), size, is_sound=is_sound)
        return np.frombuffer(pack(made.inputs), np.uint8)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that describe this object to decode processes."""
        processor = self.processor
        told = {"folder": str(processor.folder), "max_pixels": processor.max_pixels}
        return {"kind": "chat", "source": self.records.format(), **told}

    @classmethod
    def of(cls, told: dict[str, Any]) -> ChatItems:
        """Return the object for the output of `to_json`."""
        processor = FolderProcessor(Path(told["folder"]), told["max_pixels"])
        return cls(ChatRecords.parse(told["source"]), processor)


class ChatAhead(MixedAhead):
    """Conversations by index: `input_ids` and `learnt`, each (T,), and the inputs of their images and audio clips."""

    def _sample(self, index: int, made: Mapping[int, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        records = self.items.records
        items = [unpack(made[item]) for item in self.items.of_sample(index)]
        names = dict.fromkeys(name for item in items for name in item)
        inputs = {name: np.concatenate([item[name] for item in items if name in item]) for name in names}
        return {"input_ids": records.tokens(index), "learnt": records.learnt(index), **inputs}
