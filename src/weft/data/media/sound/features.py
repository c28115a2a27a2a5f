"""Features of a wave: log-mel bands of our own, or what the feature extractor of a Hugging Face folder makes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from weft.data.media.sound.mel import log_mel
from weft.errors import DataError, MissingExtra

_FILE = "preprocessor_config.json"


@dataclass(frozen=True, slots=True)
class LogMel:
    """Whisper's log-mel bands. filled: samples that a wave is filled up to with silence; 0: it is left as it is.

    rate: of the samples. mels: bands. n_fft, hop: samples of a window, and from one to the next.
    """

    rate: int = 16_000
    mels: int = 80
    n_fft: int = 400
    hop: int = 160
    filled: int = 0

    kind: ClassVar[str] = "log_mel"
    #: What transformers' models call them.
    name: ClassVar[str] = "input_features"

    def shape(self, most_samples: int) -> tuple[int, ...]:
        """Return the largest shape of the features of so many samples: bands and frames."""
        return self.mels, max(most_samples, self.filled, self.hop) // self.hop

    def __call__(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the features of a wave, (M, T)."""
        wanted = max(self.filled, self.hop)  # one frame at least
        if len(wave) < wanted:
            wave = np.concatenate((wave, np.zeros(wanted - len(wave), np.float32)))
        return log_mel(wave, rate=self.rate, mels=self.mels, n_fft=self.n_fft, hop=self.hop)

    def frames(self, num_samples: int) -> int:
        """Return how many frames so many samples of a recording reach into."""
        return -(-num_samples // self.hop)

    def told(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True, slots=True)
class FolderFeatures:
    """What transformers' feature extractor of a folder makes of a wave. rate: of the samples; mels: rows that it gives.

    name: of the model's input. is_turned: whether the extractor gives frames before bands.
    """

    folder: str
    rate: int
    mels: int
    name: str
    is_turned: bool

    kind: ClassVar[str] = "folder"

    def shape(self, most_samples: int) -> tuple[int, ...]:
        """Return the largest shape of the features of so many samples: bands and frames."""
        return self(np.zeros(most_samples, np.float32)).shape

    def __call__(self, wave: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the features of a wave, bands and frames."""
        made = _extractor(self.folder)(wave, sampling_rate=self.rate, return_tensors="np")[self.name][0]
        found = np.asarray(made, np.float32)
        return np.ascontiguousarray(found.T if self.is_turned else found)

    def frames(self, num_samples: int) -> int:
        """Return how many frames so many samples of a recording reach into."""
        return self.shape(num_samples)[1]

    def told(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"kind": self.kind, **asdict(self)}


Features = LogMel | FolderFeatures


def parse_features(told: dict[str, Any]) -> Features:
    """Return the features that `told` describes."""
    kinds = {kind.kind: kind for kind in (LogMel, FolderFeatures)}
    return kinds[told["kind"]](**{name: value for name, value in told.items() if name != "kind"})


def folder_features(folder: Path) -> tuple[Features, float | None]:
    """Return the features of a Hugging Face folder, and the seconds that they reach over at most; None: any number.

    Of a Whisper they are computed here, to the same numbers without transformers.

    Args:
        folder: with preprocessor_config.json.

    Raises:
        DataError: where it has no feature extractor for sound that can be read.
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
            f"model.path={folder}: its {_FILE} makes a {type(extractor).__name__}, which is not for sound. Give the "
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
    """The extractor of a folder, loaded once and again when its file changes."""
    del changed_ns
    try:
        from transformers import AutoFeatureExtractor
    except ImportError as error:
        raise MissingExtra("transformers", "hf", "a Hugging Face model") from error
    try:
        return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what it raises depends on what the file holds
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise DataError(
            f"model.path={folder}: transformers cannot read its {_FILE} ({first}). Copy that file of the model again."
        ) from error
