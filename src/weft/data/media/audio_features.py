"""Log-mel spectrograms, as Whisper's feature extractor and torchaudio define them.

The code uses numpy without matmuls: with threads, their last bits would depend on the number of threads. Shapes: M mel
bands, T frames, F frequencies.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from weft.errors import DataError, MissingExtra

#: Frequency up to which the mel scale of Slaney's Auditory Toolbox is linear. It is logarithmic above.
_KNEE_HZ, _KNEE_MEL, _HZ_PER_MEL = 1000.0, 15.0, 200.0 / 3.0
_LOG_STEP = np.log(6.4) / 27.0
#: Minimum energy before the logarithm, and maximum distance from the loudest value, in powers of ten.
_FLOOR, _RANGE = 1e-10, 8.0
#: Frames that are transformed together. Arrays of this size are allocated from the heap, without new memory pages.
_AT_ONCE = 32


def log_mel(
    wave: NDArray[np.float32], *, rate: int = 16_000, mels: int = 80, n_fft: int = 400, hop: int = 160
) -> NDArray[np.float32]:
    """Return Whisper's features of a wave, (M, T) with T = len(wave) // hop, in a range of about -1.5 to 1.5.

    Args:
        wave: samples, with values from -1 to 1.
        rate: samples per second.
        mels: number of bands. They cover frequencies up to half the rate, or up to 8 kHz if that is less.
        n_fft: samples of a window.
        hop: samples from one window to the next.
    """
    energy = mel_energy(wave, mel_filters(rate, mels, n_fft, most_hz=8000.0), n_fft, hop)[:, :-1]
    found = np.maximum(energy, _FLOOR)
    np.log10(found, out=found)
    if found.size:
        np.maximum(found, found.max() - _RANGE, out=found)
    found += 4.0
    return (found / 4.0).astype(np.float32)


def mel_energy(wave: NDArray[np.float32], filters_MF: NDArray[np.float64], n_fft: int, hop: int) -> NDArray[np.float64]:
    """Return the energy of each band, (M, T) with T = 1 + len(wave) // hop. Windows are centered.

    Equal to torchaudio's MelSpectrogram with power 2, a periodic Hann window and reflect padding.

    Args:
        wave: samples.
        filters_MF: filters from `mel_filters`.
        n_fft: samples of a window.
        hop: samples from one window to the next.
    """
    padded = np.pad(wave, n_fft // 2, mode="reflect" if len(wave) > 1 else "edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop]
    hann = 0.5 - 0.5 * np.cos(2.0 * np.pi * np.arange(n_fft) / n_fft)
    num_frames = len(windows)
    power_FT = np.empty((n_fft // 2 + 1, num_frames))
    weighed = np.empty((_AT_ONCE, n_fft))
    for start in range(0, num_frames, _AT_ONCE):
        some = windows[start : start + _AT_ONCE]
        spectrum = np.fft.rfft(np.multiply(some, hann, out=weighed[: len(some)]))
        power_FT[:, start : start + _AT_ONCE] = (spectrum.real**2 + spectrum.imag**2).T
    found, part = np.zeros((len(filters_MF), num_frames)), np.empty(num_frames)
    for band, frequency in zip(*np.nonzero(filters_MF), strict=True):
        np.multiply(power_FT[frequency], filters_MF[band, frequency], out=part)
        np.add(found[band], part, out=found[band])
    return found


@lru_cache(maxsize=16)
def mel_filters(
    rate: int, mels: int, n_fft: int, *, most_hz: float | None = None, scale: str = "slaney", is_even: bool = True
) -> NDArray[np.float64]:
    """Return the weights of triangular mel bands over the frequencies of a Fourier transform, (M, F).

    Args:
        rate: samples per second.
        mels: number of bands.
        n_fft: samples of a window; F is n_fft // 2 + 1.
        most_hz: upper end of the last band, in Hz, or None for half the rate.
        scale: "slaney" or "htk".
        is_even: divide each band by half its width in Hz, like `norm="slaney"` in other libraries.
    """
    top = min(most_hz or rate / 2, rate / 2)
    edges = _hz(np.linspace(0.0, _mel(top, scale), mels + 2), scale)
    frequencies = np.linspace(0.0, rate // 2, n_fft // 2 + 1)
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    found = np.maximum(0.0, np.minimum(rising, falling))
    if is_even:
        found *= (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return found


def _mel(hz: float, scale: str) -> float:
    if scale == "htk":
        return float(2595.0 * np.log10(1.0 + hz / 700.0))
    return float(hz / _HZ_PER_MEL if hz < _KNEE_HZ else _KNEE_MEL + np.log(hz / _KNEE_HZ) / _LOG_STEP)


def _hz(mel: NDArray[np.float64], scale: str) -> NDArray[np.float64]:
    if scale == "htk":
        return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    return np.where(mel < _KNEE_MEL, mel * _HZ_PER_MEL, _KNEE_HZ * np.exp(_LOG_STEP * (mel - _KNEE_MEL)))


# Feature extractors: Weft's log-mel bands, or the feature extractor of a Hugging Face folder.

_FILE = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class LogMel:
    """Whisper's log-mel bands.

    Attributes:
        rate: samples per second.
        mels: number of bands.
        n_fft: samples of a window.
        hop: samples from one window to the next.
        filled: number of samples to which a wave is padded with silence, or 0 for no padding.
    """

    rate: int = 16_000
    mels: int = 80
    n_fft: int = 400
    hop: int = 160
    filled: int = 0

    kind: ClassVar[str] = "log_mel"
    #: Names of the input in transformers' models.
    name: ClassVar[str] = "input_features"

    @classmethod
    def at_rate(cls, rate: int, mels: int) -> LogMel:
        """Return the features for windows of 25 ms, 10 ms apart."""
        return cls(rate, mels, 2 * round(200 * rate / 16_000), round(160 * rate / 16_000))

    def shape(self, most_samples: int) -> tuple[int, ...]:
        """Return the largest shape of the features of up to `most_samples` samples: (bands, frames)."""
        return self.mels, max(most_samples, self.filled, self.hop) // self.hop

    def __call__(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        wanted = max(self.filled, self.hop)  # at least one frame
        if len(wave) < wanted:
            wave = np.concatenate((wave, np.zeros(wanted - len(wave), np.float32)))
        return log_mel(wave, rate=self.rate, mels=self.mels, n_fft=self.n_fft, hop=self.hop)

    def frames(self, num_samples: int) -> int:
        """Return the number of frames that cover `num_samples` samples of an audio clip."""
        return -(-num_samples // self.hop)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that `parse_features` reads."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, slots=True)
class FolderFeatures:
    """Features of the transformers feature extractor in a folder.

    Attributes:
        folder: a Hugging Face folder with preprocessor_config.json.
        rate: samples per second.
        mels: number of bands.
        name: name of the model's input.
        is_turned: whether the extractor returns (frames, bands) instead of (bands, frames).
    """

    folder: str
    rate: int
    mels: int
    name: str
    is_turned: bool

    kind: ClassVar[str] = "folder"

    def shape(self, most_samples: int) -> tuple[int, ...]:
        """Return the largest shape of the features of up to `most_samples` samples: (bands, frames)."""
        return self(np.zeros(most_samples, np.float32)).shape

    def __call__(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        made = _extractor(self.folder)(wave, sampling_rate=self.rate, return_tensors="np")[self.name][0]
        found = np.asarray(made, np.float32)
        return np.ascontiguousarray(found.T if self.is_turned else found)

    def frames(self, num_samples: int) -> int:
        """Return the number of frames that cover `num_samples` samples of an audio clip."""
        return self.shape(num_samples)[1]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON values that `parse_features` reads."""
        return {"kind": self.kind, **asdict(self)}


Features = LogMel | FolderFeatures


def parse_features(values: dict[str, Any]) -> Features:
    """Return the features that JSON values (the output of `to_json`) describe."""
    kinds = {kind.kind: kind for kind in (LogMel, FolderFeatures)}
    return kinds[values["kind"]](**{name: value for name, value in values.items() if name != "kind"})


def folder_features(folder: Path) -> tuple[Features, float | None]:
    """Return the feature extractor of a Hugging Face folder, and its maximum length in seconds or None.

    Whisper's features are computed by Weft, with equal values.

    Args:
        folder: a folder with preprocessor_config.json.

    Raises:
        DataError: if the folder has no readable feature extractor for audio.
        MissingExtra: if transformers is not installed.
    """
    try:
        fields = json.loads((folder / _FILE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"model.path={folder}: its {_FILE} cannot be read ({getattr(error, 'strerror', None) or error}). Copy that "
            "file of the model into the folder."
        ) from error
    extractor = _extractor(str(folder))
    rate = getattr(extractor, "sampling_rate", None)
    if not isinstance(rate, int):
        raise DataError(
            f"model.path={folder}: its {_FILE} makes a {type(extractor).__name__}, which is not for audio. Give the "
            "folder of a model for speech."
        )
    seconds = fields.get("chunk_length", getattr(extractor, "chunk_length", None))
    if type(extractor).__name__ == "WhisperFeatureExtractor" and rate == 16_000 and not extractor.dither:
        samples = int(extractor.n_samples)
        found = LogMel(rate, int(extractor.feature_size), int(extractor.n_fft), int(extractor.hop_length), samples)
        return found, samples / rate
    made = extractor(np.zeros(rate, np.float32), sampling_rate=rate, return_tensors="np")
    name = str(extractor.model_input_names[0])
    first = np.asarray(made[name])[0]
    if first.ndim != 2:
        raise DataError(
            f"model.path={folder}: its {type(extractor).__name__} gives samples, and this task trains on bands of "
            "pitch. Give the folder of a Whisper, or of another model with input_features."
        )
    mels = int(getattr(extractor, "num_mel_bins", 0) or getattr(extractor, "feature_size", 0))
    return FolderFeatures(str(folder), rate, mels, name, first.shape[0] != mels), seconds


def _extractor(folder: str) -> Any:
    file = Path(folder) / _FILE
    return _loaded(folder, file.stat().st_mtime_ns if file.is_file() else 0)


@lru_cache(maxsize=2)
def _loaded(folder: str, changed_ns: int) -> Any:
    """Return the extractor of a folder, which is cached until its file changes."""
    del changed_ns
    try:
        from transformers import AutoFeatureExtractor
    except ImportError as error:
        raise MissingExtra("transformers", "hf", "a Hugging Face model") from error
    try:
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the exception depends on the file's content
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise DataError(
            f"model.path={folder}: transformers cannot read its {_FILE} ({first}). Copy that file of the model again."
        ) from error
