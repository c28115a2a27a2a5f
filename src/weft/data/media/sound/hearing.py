"""What is heard of a recording: one channel at one rate, at most so many seconds, with changes drawn by a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.data.media.encoded import Encoded
from weft.data.media.sample_draws import drawn_from
from weft.data.media.sound.sound_file import read_frames
from weft.errors import MissingExtra

#: A mask covers at most this share of the frames, and this share of the bands.
_TIME_SHARE, _BAND_SHARE = 0.125, 0.25


@dataclass(frozen=True, slots=True)
class Hearing:
    """How a recording is heard.

    rate: samples a second. seconds: heard of it at most. crops: a random part is taken of a longer one, in place of its
    middle. gain: it becomes up to so many dB louder or softer. noise: white noise is added, of up to this share of the
    recording's own level. masks: so many stretches of time, and as many of pitch, are hidden (SpecAugment, arXiv
    1904.08779).
    """

    rate: int
    seconds: float
    crops: bool = False
    gain: float = 0.0
    noise: float = 0.0
    masks: int = 0

    @property
    def most_samples(self) -> int:
        """Return how many samples are heard at most."""
        return round(self.seconds * self.rate)


def soxr() -> Any:
    """Return the soxr module, which resamples.

    Raises:
        MissingExtra: where it is not installed.
    """
    try:
        import soxr
    except ImportError as error:
        raise MissingExtra("soxr", "media", "recordings of another rate") from error
    return soxr


def hear(
    encoded: Encoded, size: tuple[int, ...], hearing: Hearing, key: tuple[int | str, ...] = ()
) -> NDArray[np.float32]:
    """Return samples of a recording, full scale as 1: the mean of its channels, resampled. No more of it is decoded.

    Args:
        encoded: the recording.
        size: its frames, frames a second and channels.
        hearing: how it is heard.
        key: what is drawn follows from it.

    Raises:
        DataError: where it cannot be decoded.
        MissingExtra: where its rate differs, and soxr is not installed.
    """
    frames, rate, _ = size
    rng = drawn_from(key)
    wanted = min(frames, round(hearing.seconds * rate))
    place = rng.random() if hearing.crops else 0.5
    found = read_frames(encoded, round(place * (frames - wanted)), wanted)
    wave = found[:, 0] if found.shape[1] == 1 else found.mean(1, dtype=np.float32)
    if rate != hearing.rate:
        wave = np.asarray(soxr().resample(wave, rate, hearing.rate, quality="HQ"), np.float32)
    wave = np.ascontiguousarray(wave[: hearing.most_samples])
    if hearing.gain:
        wave = wave * np.float32(10.0 ** (rng.uniform(-hearing.gain, hearing.gain) / 20.0))
    if hearing.noise:
        level = np.sqrt(np.mean(np.square(wave, dtype=np.float64))) * rng.uniform(0.0, hearing.noise)
        wave = wave + rng.standard_normal(len(wave), np.float32) * np.float32(level)
    return wave


def masked(
    features_MT: NDArray[np.float32], count: int, num_frames: int, key: tuple[int | str, ...]
) -> NDArray[np.float32]:
    """Return features of which some stretches of time and of pitch have the mean of all, in place.

    Args:
        features_MT: bands, then frames.
        count: of the stretches, each.
        num_frames: of the recording; those after are filled up.
        key: where they lie follows from it.
    """
    rng = drawn_from((*key, "masks"))
    heard = features_MT[:, :num_frames]
    mean = heard.mean(dtype=np.float64).astype(np.float32)
    for _ in range(count):
        for axis, share in ((1, _TIME_SHARE), (0, _BAND_SHARE)):
            length = heard.shape[axis]
            width = int(rng.integers(0, int(length * share) + 1))
            start = int(rng.integers(0, length - width + 1))
            hidden = heard[:, start : start + width] if axis else heard[start : start + width]
            hidden[:] = mean
    return features_MT
