"""Classification of recordings: folders of classes or records, log-mel bands, noise that follows the sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.media import SOUND, MediaRecords, RecordColumns, Sounds, find_records, record_files
from weft.data.media.sound import Hearing, LogMel
from weft.data.prepared import cache_folder
from weft.errors import DataError
from weft.models.speech import build_speech_model
from weft.monitor.screen import SheetEntry
from weft.train.task import Metric
from weft.train.tasks.tuned.media.media_task import MediaTask
from weft.train.tasks.tuned.token_costs import TokenCosts


@dataclass(eq=False)
class AudioClassTask(MediaTask):
    """Trains a network to name the class of a recording.

    data: a folder with a folder of recordings for each class; or records: a file, a folder or a glob of .tar shards,
    .jsonl or .parquet files, whose columns `audio` and `label` are found by the usual names. eval: the same for other
    recordings of these classes; by default a share `holdout` of the recordings. model: speech-tiny. rate: samples a
    second that recordings are resampled to. mels: bands of pitch. seconds: heard of a recording at most; of a longer
    one training hears a random part with `augment`, and evaluation the middle. gain: dB by which recordings become
    louder or softer at most. noise: white noise up to this share of a recording's own level. masks: so many stretches
    of time and as many of pitch are hidden. dropout: rate within the network. pad_multiple: what the frames of a batch
    are rounded up to.
    """

    data: str
    eval: str = ""
    holdout: float = 0.1
    model: str = "speech-tiny"
    rate: int = 16_000
    mels: int = 80
    seconds: float = 4.0
    augment: bool = True
    gain: float = 0.0
    noise: float = 0.0
    masks: int = 0
    dropout: float = 0.1
    pad_multiple: int = 16
    audio: str = ""
    label: str = ""

    unit = sample_unit = "recordings"
    media_file = "recordings.json"
    metrics = (Metric("accuracy", "", "Share of the recordings whose class the model names."),)
    sum_names = ("right",)
    sections = (*MediaTask.sections, "data.batching", "data.microbatch_cost")
    fills_seq_len = False

    def __post_init__(self) -> None:
        self.check_share()
        for name, least, most, rule in (
            ("rate", 4000, 96_000, "recordings are resampled to 4000 to 96000 samples a second"),
            ("mels", 8, 128, "a model reads 8 to 128 bands of pitch"),
            ("seconds", 0.1, 600.0, "0.1 to 600 seconds are heard of a recording"),
            ("gain", 0.0, 60.0, "it is a change of 0 to 60 dB"),
            ("noise", 0.0, 10.0, "it is a share of a recording's own level, 0 to 10"),
            ("masks", 0, 16, "0 to 16 stretches are hidden"),
            ("dropout", 0.0, 0.99, "it is a share, 0 or more and less than 1"),
            ("pad_multiple", 1, 4096, "frames are rounded up to a multiple of 1 to 4096"),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise DataError(f"{name}={value}: {rule}. Use a number between.")

    # --- the recordings ---

    def source(self, option: str, path: str, told: Callable[[int, int], None] | None) -> MediaRecords:
        """Find the recordings of a path: records where it names files of them, else a folder of classes.

        Args:
            option: that names the path.
            path: as the user typed it.
            told: of (done, all).

        Raises:
            DataError: for what is wrong with the data.
        """
        files = record_files(path, SOUND)
        for name in ("audio", "label"):
            if getattr(self, name) and not files:
                raise DataError(
                    f"task.options.{name}={getattr(self, name)}: it names a column of records, and {option}={path} has "
                    "no .tar, .jsonl or .parquet file. Leave it out."
                )
        columns = RecordColumns(self.audio, self.label, SOUND)
        return find_records(path, files or [Path(path)], columns, cache_folder(self.config.data), told)

    def made(self, source: MediaRecords, split: str) -> Sounds:
        hearing = Hearing(self.rate, self.seconds)
        if split == "train":
            hearing = Hearing(self.rate, self.seconds, self.augment, self.gain, self.noise, self.masks)
        scale = self.rate / 16_000  # windows of 25 ms, 10 ms apart
        features = LogMel(self.rate, self.mels, 2 * round(200 * scale), round(160 * scale))
        return Sounds(source, hearing, features, self.config.seed)

    def sheet_entry(self, place: int, split: str) -> SheetEntry:
        source, (epoch, index) = self.media(split), self.shown(place, split)
        said, sounds = [(f"class {source.classes[source.label(index)]!r}", 1.0)], self.made(source, split)
        wave, bands = sounds.wave(epoch, index), sounds.decoded(epoch, index)
        return SheetEntry(self.sheet_title(place, split), wave=wave, rate=self.rate, bands=bands, text=said)

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        frames = [made.shape[1] for made, _ in samples]
        length = -(-max(frames) // self.pad_multiple) * self.pad_multiple
        features = np.zeros((len(samples), self.mels, length), np.float32)
        for row, (made, _) in zip(features, samples, strict=True):
            row[:, : made.shape[1]] = made
        labels = torch.tensor([label for _, label in samples])
        return {"features": torch.from_numpy(features), "frames": torch.tensor(frames), "labels": labels}

    # --- what samples cost ---

    def lengths(self) -> np.ndarray:
        """Return the frames that each recording is filled up to where it stands alone, int64 (samples,)."""
        frames, rates = self.media("train").sizes_of_all()[:, :2].T
        heard = np.minimum(frames / np.maximum(1, rates), self.seconds) * self.rate
        found = np.maximum(1, heard.astype(np.int64) // round(self.rate / 100))
        return -(-found // self.pad_multiple) * self.pad_multiple

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        """Return what frames cost, in frames: of four of them the network makes a token."""
        model: Any = self.shapes()
        costs = TokenCosts.of(model, len(model.blocks), model.norm.normalized_shape[0])
        return 4.0 * costs.work(np.asarray(lengths) / 4.0) / costs.work(1)

    # --- the model ---

    def build(self) -> nn.Module:
        return build_speech_model(self.model, len(self.media("train").classes), self.mels, dropout=self.dropout)

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        logits = output if output.itemsize == 8 else output.float()
        return F.cross_entropy(logits, batch["labels"], reduction="sum"), len(batch["labels"])

    def sums(self, output: Tensor, batch: Any) -> Mapping[str, Tensor | float]:
        return {"right": (output.argmax(1) == batch["labels"]).sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"accuracy": sums["right"] / sums["count"]}

    def name(self) -> str:
        return self.model
