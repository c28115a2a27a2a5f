"""Samples of text, images and audio as model inputs. Images and audio clips (items) are decoded in the background.

Augmentation of an item is a function of (seed, epoch, item index), so it is equal on any rank and after a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.audio import AudioTransform, apply_transform, masked
from weft.data.media.audio_features import LogMel, parse_features
from weft.data.media.decode_workers import DecodedAhead, Key
from weft.data.media.images import Look, read_picture
from weft.data.media.mixed_records import FeatureShards, MixedRecords


@dataclass(frozen=True, slots=True)
class MixedSample:
    """A sample of text, images and audio.

    Attributes:
        tokens: token ids with a marker for each image or audio clip, int32 (T,).
        learnt: nonzero for tokens that count in the loss, uint8 (T,).
        media: in order, pixels uint8 (3, side, side), mel bands float32 (M, frames), or stored encoder features
            (R rows, D features).
        items: item indices of the media, counted over all samples.
        index: index of the sample.
    """

    tokens: NDArray[np.int32]
    learnt: NDArray[np.uint8]
    media: tuple[NDArray[Any], ...]
    items: tuple[int, ...]
    index: int


class _Source:
    """Locations of items, for error messages of the decode processes."""

    def __init__(self, items: MixedItems):
        self._items = items

    def file(self, item: int) -> str:
        index, number = self._items.locate(item)
        return self._items.records.medium(index, number).name


class MixedItems:
    """Images and audio clips of samples, by item index. Decode processes return them as bytes.

    Args:
        records: the samples.
        look: transform of images.
        hearing: transform of audio clips.
        features: features of audio clips.
        seed: the run's seed.
    """

    dtype = np.dtype(np.uint8)
    #: Name of the option that reduces the size of a decoded sample, for error messages.
    smaller = "seconds"

    def __init__(self, records: MixedRecords, look: Look, hearing: AudioTransform, features: LogMel, seed: int):
        self.records, self.look, self.hearing, self.features, self.seed = records, look, hearing, features, seed
        self._count_items()
        self.bands_shape = features.shape(hearing.most_samples)
        #: Largest shape of an item.
        self.shape = (max(3 * look.side**2, 4 * int(np.prod(self.bands_shape))),)

    def _count_items(self) -> None:
        self._starts = np.concatenate(([0], np.cumsum(self.records.num_media())))
        self.source = _Source(self)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def of_sample(self, index: int) -> range:
        """Return the item indices of a sample."""
        return range(int(self._starts[index]), int(self._starts[index + 1]))

    def locate(self, item: int) -> tuple[int, int]:
        """Return the sample index of an item, and its position in the sample."""
        index = int(np.searchsorted(self._starts, item, "right")) - 1
        return index, item - int(self._starts[index])

    def learnt(self, index: int) -> None:
        """Return None, because an item has no target."""

    def decoded(self, epoch: int, index: int) -> NDArray[np.uint8]:
        """Return the bytes of an item in an epoch, uint8 (B,)."""
        return np.ascontiguousarray(self.medium(epoch, index)).view(np.uint8).reshape(-1)

    def shaped(self, item: int, values: NDArray[np.uint8]) -> NDArray[Any]:
        """Return an item's pixels or mel bands from its bytes."""
        index, number = self.locate(item)
        if not self.records.sizes(index)[number][0]:
            return values.reshape(3, self.look.side, self.look.side)
        return values.view(np.float32).reshape(self.bands_shape[0], -1)

    def medium(self, epoch: int, item: int) -> NDArray[Any]:
        """Return an item in an epoch: pixels (3, side, side) or mel bands (M, frames)."""
        index, number = self.locate(item)
        encoded, key = self.records.medium(index, number), (self.seed, epoch, item)
        is_sound, size = self.records.sizes(index)[number]
        if not is_sound:
            return read_picture(encoded, self.look, key)
        wave = apply_transform(encoded, size, self.hearing, key)
        made = self.features(wave)
        if not self.hearing.masks:
            return made
        frames = max(1, min(made.shape[1], self.features.frames(len(wave))))
        return masked(made, self.hearing.masks, frames, key)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that describe this object to decode processes."""
        return {
            "kind": "mixed",
            "source": self.records.format(),
            "look": asdict(self.look),
            "hearing": asdict(self.hearing),
            "features": self.features.to_json(),
            "seed": self.seed,
        }

    @classmethod
    def of(cls, told: dict[str, Any]) -> MixedItems:
        """Return the object that `to_json` described."""
        features = parse_features(told["features"])
        assert isinstance(features, LogMel)
        source, look, hearing = MixedRecords.parse(told["source"]), Look(**told["look"]), told["hearing"]
        return cls(source, look, AudioTransform(**hearing), features, told["seed"])


class MixedAhead:
    """Samples by index, whose images and audio clips are decoded by processes that the first batched access starts.

    Args:
        items: the images and audio clips.
        workers: number of processes, or 0 to decode in the rank.
        kept: returns the stored encoder features. They replace the decoded images or audio clips in
            `MixedSample.media`.
    """

    def __init__(self, items: MixedItems, workers: int, kept: Callable[[], Sequence[FeatureShards]] | None = None):
        self.items, self._kept = items, kept
        self._ahead = DecodedAhead(items, workers)

    def __len__(self) -> int:
        return len(self.items.records)

    def __getitem__(self, index: int) -> Any:
        return self.in_epoch(0, index)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def in_epoch(self, epoch: int, index: int) -> Any:
        """Return a sample in an epoch."""
        made = {item: self.items.medium(epoch, item) for item in self._decoded(index)}
        return self._sample(index, made)

    def many(self, wanted: Sequence[Key], soon: Sequence[Key] = ()) -> list[Any]:
        """Return samples, and decode the media of others in the background.

        Args:
            wanted: (epoch, index) of each sample to return.
            soon: (epoch, index) of each sample to decode in the background.

        Raises:
            DataError: if an image or an audio clip cannot be decoded.
        """
        keys, later = (
            [(epoch, item) for epoch, index in some for item in self._decoded(index)] for some in (wanted, soon)
        )
        made = iter(self.media(keys, later))
        return [self._sample(index, {item: next(made) for item in self._decoded(index)}) for _, index in wanted]

    def media(self, wanted: Sequence[Key], soon: Sequence[Key] = ()) -> list[NDArray[Any]]:
        """Return images (3, side, side) and mel bands (M, frames), and decode others in the background.

        Args:
            wanted: (epoch, item index) of each item to return.
            soon: (epoch, item index) of each item to decode in the background.

        Raises:
            DataError: if an item cannot be decoded.
        """
        made = self._ahead.many(wanted, soon) if wanted or soon else ()
        return [self.items.shaped(item, values) for (values, _), (_, item) in zip(made, wanted, strict=True)]

    def _decoded(self, index: int) -> list[int]:
        """Return the indices of a sample's items that must be decoded, because they have no stored features."""
        items, kinds = self.items.of_sample(index), {one.is_sound for one in self._shards()}
        if not kinds:
            return list(items)
        sizes = self.items.records.sizes(index)
        return [item for item, (is_sound, _) in zip(items, sizes, strict=True) if is_sound not in kinds]

    def _shards(self) -> Sequence[FeatureShards]:
        return () if self._kept is None else self._kept()

    def _sample(self, index: int, made: Mapping[int, NDArray[Any]]) -> Any:
        records, items = self.items.records, tuple(self.items.of_sample(index))
        kept = {shards.is_sound: shards for shards in self._shards()}
        sizes = records.sizes(index) if kept else [(False, ())] * len(items)
        media = tuple(
            made[item] if item in made else kept[is_sound][item]
            for item, (is_sound, _) in zip(items, sizes, strict=True)
        )
        return MixedSample(records.tokens(index), records.learnt(index), media, items, index)

    def pids(self) -> list[int]:
        """Return the ids of the running decode processes."""
        return self._ahead.pids()

    def close(self) -> None:
        """Stop the processes. The next call to `many` or `media` starts new ones."""
        self._ahead.close()
