"""Features of a source's audio clips, by index. Augmentation is a function of (seed, epoch, index)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.audio import AudioTransform, apply_transform, masked
from weft.data.media.audio_features import Features, parse_features
from weft.data.media.media_records import MediaRecords


class Sounds:
    """Features of the audio clips of a source, with one transform.

    Args:
        source: the audio clips.
        hearing: the transform of the samples.
        features: the features computed from the samples.
        seed: the run's seed.
    """

    dtype = np.dtype(np.float32)
    #: Name of the option that reduces the size of a decoded sample, for error messages.
    smaller = "seconds"

    def __init__(self, source: MediaRecords, hearing: AudioTransform, features: Features, seed: int):
        self.source, self.hearing, self.features, self.seed = source, hearing, features, seed
        #: Largest shape of a sample.
        self.shape = features.shape(hearing.most_samples)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[NDArray[np.float32], Any]:
        return self.in_epoch(0, index)

    def __iter__(self) -> Iterator[tuple[NDArray[np.float32], Any]]:
        return (self[index] for index in range(len(self)))

    def in_epoch(self, epoch: int, index: int) -> tuple[NDArray[np.float32], Any]:
        """Return the features and the target of a sample in an epoch."""
        return self.decoded(epoch, index), self.learnt(index)

    def learnt(self, index: int) -> Any:
        """Return the target of a sample: its class number, or the tokens of its text."""
        return self.source.tokens(index) if self.source.columns.is_text else self.source.label(index)

    def wave(self, epoch: int, index: int) -> NDArray[np.float32]:
        """Return the transformed wave of a sample in an epoch."""
        key = (self.seed, epoch, index)
        return apply_transform(self.source.encoded(index), self.source.size(index), self.hearing, key)

    def decoded(self, epoch: int, index: int) -> NDArray[np.float32]:
        """Return the features of a sample in an epoch, (bands, frames)."""
        wave = self.wave(epoch, index)
        made = self.features(wave)
        if not self.hearing.masks:
            return made
        frames = max(1, min(made.shape[1], self.features.frames(len(wave))))
        return masked(made, self.hearing.masks, frames, (self.seed, epoch, index))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that describe this object to decode processes."""
        return {
            "kind": "sounds",
            "source": self.source.format(),
            "hearing": asdict(self.hearing),
            "features": self.features.to_json(),
            "seed": self.seed,
        }

    @classmethod
    def of(cls, told: dict[str, Any]) -> Sounds:
        """Return the object that `to_json` described."""
        source, features = MediaRecords.parse(told["source"]), parse_features(told["features"])
        return cls(source, AudioTransform(**told["hearing"]), features, told["seed"])
