"""Tasks on media: common handling of samples, and classification of images and audio clips."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.run_config import DataSection
from weft.data.media.audio import AudioTransform
from weft.data.media.audio_features import Features, LogMel
from weft.data.media.audio_source import Sounds
from weft.data.media.class_folder import ClassFolder, find_pictures
from weft.data.media.decode_workers import DecodedAhead, usual_workers
from weft.data.media.files import RecordColumns
from weft.data.media.image_source import Pictures, parse_source
from weft.data.media.images import Look
from weft.data.media.media_records import MediaRecords, find_records, record_files, with_classes
from weft.data.media.records import SOUND
from weft.data.store.prepare import cache_folder
from weft.env import rank_env
from weft.errors import CheckpointError, DataError, ModelError
from weft.models.speech import build_speech_model
from weft.models.vision import build_image_model
from weft.monitor.plots import GridSample
from weft.train.batches.batching_by_cost import TokenCosts
from weft.train.folder import RunFolder, free_name
from weft.train.tasks.base import Metric, Report, Task
from weft.units import format_count

#: Mean and standard deviation of ImageNet's channels (0 to 255), as used to train published weights.
_MEAN, _STD = np.array(((123.675, 116.28, 103.53), (58.395, 57.12, 57.375)), np.float32)[..., None, None]


def normalised(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return images normalised with ImageNet's mean and standard deviation.

    It uses numpy, because torch would start threads that compete with the step for cores.

    pixels: (N, 3, side, side).
    """
    values = pixels.astype(np.float32)
    values -= _MEAN
    values /= _STD
    return values


# Tasks on images and audio: the samples of a run are listed once, stored in the run folder, and decoded ahead of use.

Source = ClassFolder | MediaRecords
Progress = Callable[[int, int], None] | None


class Processor(Protocol):
    """Finds and decodes the samples of a task, and makes batches of them."""

    def find(self, option: str, path: str, progress: Progress) -> Source:
        """Find the samples at a path.

        Args:
            option: name of the option with the path.
            path: path as the user typed it.
            progress: called with (done, total).

        Raises:
            DataError: for invalid data.
        """
        ...

    def decoded(self, source: Any, split: str) -> Any:
        """Return the samples of a split by index. Each is decoded and transformed when it is read."""
        ...

    def collate(self, samples: list[Any]) -> Any:
        """Make a batch from a list of samples."""
        ...

    def described(self, source: Any, index: int) -> str:
        """Return a text with the path and the target of a sample."""
        ...

    def preview(self, source: Any, split: str, epoch: int, index: int) -> GridSample:
        """Return the model's input and the target of a sample, without a title."""
        ...


class MediaTask(Task):
    """Trains on media in a folder of classes or in records. A subclass defines the processor, the model and the loss.

    data, eval: paths of the samples. holdout: share of `data` that is used for evaluation if `eval` is not set.
    """

    sections = ("data.cache_dir", "data.workers")
    #: Name of the file in the run folder that stores the samples.
    media_file: ClassVar[str]

    data: str
    eval: str = ""
    holdout: float = 0.1

    _media: Mapping[str, Source] | None = None

    @property
    def processor(self) -> Processor:
        """The processor of the task's media."""
        raise NotImplementedError

    def check_ranges(self, **ranges: tuple[float, float]) -> None:
        """Check that `holdout` is between 0 and 1, and that the given options are in their ranges.

        Args:
            ranges: smallest and largest value by the option's name.

        Raises:
            DataError: if an option is out of range.
        """
        if not 0.0 < self.holdout < 1.0:
            raise DataError(
                f"holdout={self.holdout}: it is a share of the {self.sample_unit}. Use a number between 0 and 1."
            )
        for name, (least, most) in ranges.items():
            if not least <= getattr(self, name) <= most:
                raise DataError(f"{name}={getattr(self, name)}: it is {least:g} to {most:g}. Use a number between.")

    # --- the samples ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Find the samples, or load the list of samples that the run began with.

        Raises:
            CheckpointError: if the run trains on another path.
            DataError: for invalid data, and if the records have changed since the run was started.
        """
        kept = folder.path / self.media_file
        if not kept.exists():
            self._find(report)
            return
        self._media = _read(kept)
        train = self.media("train")
        if Path(self.data).absolute() != Path(train.root).absolute():
            raise CheckpointError(
                f"task.options.data={self.data}: this run trains on {train.root}. Use it, or another run.name."
            )
        if any(isinstance(self.media(split), MediaRecords) for split in ("train", "eval")):
            self._refuse_other(folder, report)

    def _refuse_other(self, folder: RunFolder, report: Report | None) -> None:
        """Find the samples again, and raise DataError if records have changed since the run was started."""
        begun = {split: self.media(split) for split in ("train", "eval")}
        self._find(report)
        for split, source in begun.items():
            now = self.media(split)
            if isinstance(source, MediaRecords) and not (isinstance(now, MediaRecords) and _same(source, now)):
                raise DataError(
                    f"task.options.data={source.root}: the records are not those that the run in {str(folder.path)!r} "
                    f"was started with. Use {free_name(folder)} for a new run, or bring the old data back to resume."
                )

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        return {self.media_file: "".join(f"{self.media(split).format()}\n" for split in ("train", "eval"))}

    def open(self, folder: RunFolder) -> None:
        self._media = _read(folder.path / self.media_file)

    def media(self, split: str, report: Report | None = None) -> Any:
        """Return the samples of "train" or "eval". The first call finds them."""
        if self._media is None:
            self._find(report)
        assert self._media is not None
        return self._media[split]

    def _find(self, report: Report | None) -> None:
        whole = self.processor.find("data", self.data, _progress_of(report, self.data))
        split = (whole, self._find_eval(whole, report)) if self.eval else whole.split(self.holdout)
        self._media = dict(zip(("train", "eval"), split, strict=True))

    def _find_eval(self, whole: Source, report: Report | None) -> Source:
        held = self.processor.find("eval", self.eval, _progress_of(report, self.eval))
        if isinstance(held, MediaRecords):
            return with_classes(held, whole.classes, "task.options.eval")
        if held.classes != whole.classes:
            odd = sorted({*held.classes} ^ {*whole.classes})
            raise DataError(
                f"task.options.eval={self.eval}: class {odd[0]!r} is in one of the two folders only. Give both the "
                "same classes."
            )
        return held

    def samples(self, split: str) -> DecodedAhead:
        return DecodedAhead(self.processor.decoded(self.media(split), split), self.num_workers())

    def collate(self, samples: list[Any]) -> Any:
        return self.processor.collate(samples)

    def samples_per_epoch(self) -> int:
        return len(self.media("train"))

    def num_workers(self) -> int:
        """Return the number of worker processes in which this rank decodes samples."""
        place = rank_env()
        asked = self.config.data.workers
        return usual_workers(place.local_world_size if place is not None else 1) if asked is None else asked

    # --- text for users ---

    def shown(self, place: int, split: str = "train") -> tuple[int, int]:
        """Return (epoch, index) of the sample at a position in training order or in an evaluation."""
        from weft.train.tasks.indexed import sample_index

        samples = self.media(split)
        return sample_index(len(samples), self.config.seed, place) if split == "train" else (0, place % len(samples))

    def grid_entry(self, place: int, split: str) -> GridSample:
        """Return the grid entry of the sample at a position: position and path, the model's input and the target."""
        source, (epoch, index) = self.media(split), self.shown(place, split)
        title = f"sample {place}, epoch {epoch}: {source.file(index)}"
        return replace(self.processor.preview(source, split, epoch, index), title=title)

    def sample_lines(self, place: int) -> Sequence[str]:
        """Return the path and target of a training sample, and the values of the tensors that are made from it."""
        where, *made = super().sample_lines(place)
        return [where, self.processor.described(self.media("train"), self.shown(place)[1]), *made]

    def data_lines(self) -> Sequence[str]:
        train, held = self.media("train"), self.media("eval")
        of = f" of {len(train.classes)} classes" if train.classes else ""
        lines = [
            f"{train.root}: {format_count(len(train))} {self.sample_unit}{of}; {format_count(len(held))} for evaluation"
        ]
        return [*lines, *(f"left out: {reason}" for reason in train.unreadable[:3])]


def _progress_of(report: Report | None, what: str) -> Progress:
    return None if report is None else lambda done, total: report(f"looking at {what}", done, total)


def find_class_records(option: str, path: str, columns: RecordColumns, data: DataSection, progress: Progress) -> Any:
    """Find media with class labels in record files, or return None if the path has no record files.

    Raises:
        DataError: if the data is invalid, or `columns` has names for a path without record files.
    """
    files = record_files(path, columns.kind)
    if files:
        return find_records(path, files, columns, cache_folder(data), progress)
    for name, value in ((columns.kind.option, columns.media), ("label", columns.label)):
        if value:
            raise DataError(
                f"task.options.{name}={value}: it names a column of records, and {option}={path} has no .tar, .jsonl "
                "or .parquet file. Leave it out."
            )
    return None


def described_class(source: Any, index: int) -> str:
    return f"{source.file(index)}, class {source.classes[source.label(index)]!r}"


def class_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the summed cross-entropy, and the number of samples.

    logits: (B, C), summed in fp32 (fp64 for fp64). labels: int64 (B,).
    """
    wide = logits if logits.itemsize == 8 else logits.float()
    return F.cross_entropy(wide, labels, reduction="sum"), len(labels)


def _same(begun: MediaRecords, now: MediaRecords) -> bool:
    """Return True if two lists contain the same records, regardless of their paths."""
    one, other = (replace(source, root="", folder="", files=()) for source in (begun, now))
    return one == other


def _read(path: Path) -> dict[str, Source]:
    lines = path.read_text().splitlines()
    return dict(zip(("train", "eval"), map(parse_source, lines), strict=True))


# Classification of images: folders of classes, networks by name, crops that depend on the sample.


@dataclass(eq=False)
class ImageClassTask(MediaTask):
    """Trains a network to predict the class of an image.

    Attributes:
        data: a folder with a folder of images for each class; or records: a file, a folder or a glob of .tar shards,
            .jsonl or .parquet files, whose columns `picture` and `label` are found by the usual names.
        eval: the same for evaluation; by default a share `holdout` of the images.
        model: resnet18, resnet34, resnet50, vgg11, vgg16 ("vgg16_bn": with batch norm), vit-tiny, vit-base.
        side: width and height of the resized images in pixels.
        augment: crop and flip at random, by (seed, epoch, image).
        colour: change brightness, contrast and saturation by up to this share.
        noise: standard deviation of the noise that is added to pixel values (0 to 255).
        weights: a safetensors file with torchvision's names, or transformers' names for vit-*, to start from; a head
            for another number of classes keeps its initial values.
        picture, label: names of the columns of records; "" finds the usual names.
    """

    data: str
    eval: str = ""
    holdout: float = 0.1
    model: str = "resnet18"
    side: int = 224
    augment: bool = True
    weights: str = ""
    colour: float = 0.0
    noise: float = 0.0
    picture: str = ""
    label: str = ""

    unit = sample_unit = "pictures"
    media_file = "pictures.json"
    metrics = (
        Metric("accuracy", "", "Share of the images whose class the model names."),
        Metric("top5", "", "Share of the images whose class is among the five that the model finds likeliest."),
    )
    sum_names = ("right", "among_five")

    def __post_init__(self) -> None:
        self.check_ranges(side=(8, 2**16), colour=(0.0, 0.99), noise=(0.0, 255.0))

    @cached_property
    def processor(self) -> PictureProcessor:
        look = Look(self.side, self.augment, self.augment, self.colour, self.noise)
        return PictureProcessor(look, RecordColumns(self.picture, self.label), self.config.data, self.config.seed)

    # --- the model ---

    def build(self) -> nn.Module:
        model = build_image_model(self.model, len(self.media("train").classes), self.side)
        if self.weights and next(model.parameters()).device.type != "meta":
            _load(model, Path(self.weights))
        return model

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return class_loss(output, batch[1])

    def sums(self, output: Tensor, batch: Any) -> Mapping[str, Tensor | float]:
        places = output.topk(min(5, output.shape[1])).indices == batch[1][:, None]
        return {"right": places[:, 0].sum(), "among_five": places.sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"accuracy": sums["right"] / sums["count"], "top5": sums["among_five"] / sums["count"]}

    def name(self) -> str:
        return self.model


@dataclass(frozen=True)
class PictureProcessor:
    """Processor of images with classes.

    look: transform of images in training. columns: names of the columns in records.
    """

    look: Look
    columns: RecordColumns
    data: DataSection
    seed: int

    def find(self, option: str, path: str, progress: Progress) -> Source:
        found = find_class_records(option, path, self.columns, self.data, progress)
        return find_pictures(Path(path), progress) if found is None else found

    def decoded(self, source: Source, split: str) -> Pictures:
        return Pictures(source, self.look if split == "train" else Look(self.look.side), self.seed)

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        values = normalised(np.stack([pixels for pixels, _ in samples]))
        return torch.from_numpy(values), torch.tensor([label for _, label in samples])

    def described(self, source: Source, index: int) -> str:
        return described_class(source, index)

    def preview(self, source: Source, split: str, epoch: int, index: int) -> GridSample:
        text = [(f"class {source.classes[source.label(index)]!r}", 1.0)]
        return GridSample("", picture=self.decoded(source, split).decoded(epoch, index), text=text)


def _load(model: nn.Module, path: Path) -> None:
    """Load published weights into a model. A head with a different number of classes keeps its initial values.

    Raises ModelError if the file cannot be read, or is of another network.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix != ".safetensors":
        raise ModelError(f"weights={path}: Weft reads safetensors alone. Convert it with safetensors.torch.save_file.")
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"weights={path}: it cannot be read ({error}). Give a file of safetensors.") from error
    own = model.state_dict()
    heads = {name for name in own if name.rpartition(".")[0] == _head(model)}
    missing = sorted(own.keys() - found.keys() - heads)
    other = sorted(n for n in own.keys() & found.keys() - heads if own[n].shape != found[n].shape)
    if missing or other:
        names = (missing or other)[:3]
        what = "is missing" if missing else "has another shape"
        raise ModelError(f"weights={path}: {', '.join(names)} {what}. Give the weights of the same network.")
    fits = {n: found[n] for n in own if n in found and own[n].shape == found[n].shape}
    model.load_state_dict(own | fits)


def _head(model: nn.Module) -> str:
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear)][-1]


# Classification of audio clips: folders of classes or records, log-mel bands, sample-dependent noise.


@dataclass(eq=False)
class AudioClassTask(MediaTask):
    """Trains a network to predict the class of an audio clip.

    Attributes:
        data: a folder with a folder of audio clips for each class; or records: a file, a folder or a glob of .tar
            shards, .jsonl or .parquet files, whose columns `audio` and `label` are found by the usual names.
        eval: the same for evaluation; by default a share `holdout` of the audio clips.
        model: speech-tiny.
        rate: sampling rate in Hz that audio clips are resampled to.
        mels: number of mel bands.
        seconds: maximum length of an audio clip; of a longer one, training with `augment` uses a random part. Otherwise
            the middle is used.
        gain: maximum change of the volume in dB.
        noise: white noise up to this fraction of a clip's level.
        masks: number of masked time spans, and of masked ranges of bands.
        dropout: dropout rate.
        pad_multiple: the padded number of frames is rounded up to a multiple of this.
        audio, label: names of the columns of records; "" finds the usual names.
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
    metrics = (Metric("accuracy", "", "Share of the audio clips whose class the model names."),)
    sum_names = ("right",)
    sections = (*MediaTask.sections, "data.batching", "data.microbatch_cost")
    fills_seq_len = False

    def __post_init__(self) -> None:
        self.check_ranges(
            rate=(4000, 96_000), mels=(8, 128), seconds=(0.1, 600.0), gain=(0.0, 60.0), noise=(0.0, 10.0),
            masks=(0, 16), dropout=(0.0, 0.99), pad_multiple=(1, 4096),
        )  # fmt: skip

    @cached_property
    def processor(self) -> ClassSounds:
        hearing = AudioTransform(self.rate, self.seconds, self.augment, self.gain, self.noise, self.masks)
        columns = RecordColumns(self.audio, self.label, SOUND)
        features = LogMel.at_rate(self.rate, self.mels)
        return ClassSounds(hearing, features, columns, self.config.data, self.config.seed, self.pad_multiple)

    # --- cost of samples ---

    def lengths(self) -> np.ndarray:
        """Return the padded number of frames of each audio clip, int64 (samples,)."""
        frames, rates = self.media("train").sizes_of_all()[:, :2].T
        heard = np.minimum(frames / np.maximum(1, rates), self.seconds) * self.rate
        found = np.maximum(1, heard.astype(np.int64) // round(self.rate / 100))
        return -(-found // self.pad_multiple) * self.pad_multiple

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        """Return the costs of audio clips, divided by the cost of one frame. The network makes a token of four frames.

        lengths: numbers of frames.
        """
        model: Any = self.shapes()
        costs = TokenCosts.of(model, len(model.blocks), model.norm.normalized_shape[0])
        return 4.0 * costs.work(np.asarray(lengths) / 4.0) / costs.work(1)

    # --- the model ---

    def build(self) -> nn.Module:
        return build_speech_model(self.model, len(self.media("train").classes), self.mels, dropout=self.dropout)

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return class_loss(output, batch["labels"])

    def sums(self, output: Tensor, batch: Any) -> Mapping[str, Tensor | float]:
        return {"right": (output.argmax(1) == batch["labels"]).sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"accuracy": sums["right"] / sums["count"]}

    def name(self) -> str:
        return self.model


@dataclass(frozen=True)
class SoundProcessor:
    """Base of processors that make features of audio clips.

    hearing: transform of audio clips in training. columns: names of the columns in records.
    """

    hearing: AudioTransform
    features: Features
    columns: RecordColumns
    data: DataSection
    seed: int

    def decoded(self, source: MediaRecords, split: str) -> Sounds:
        plain = AudioTransform(self.hearing.rate, self.hearing.seconds)
        return Sounds(source, self.hearing if split == "train" else plain, self.features, self.seed)

    def text(self, source: MediaRecords, index: int) -> list[tuple[str, float]]:
        """Return (text, weight) for each part of a sample's target, for previews."""
        return [(f"class {source.classes[source.label(index)]!r}", 1.0)]

    def preview(self, source: MediaRecords, split: str, epoch: int, index: int) -> GridSample:
        sounds = self.decoded(source, split)
        wave, bands = sounds.wave(epoch, index), sounds.decoded(epoch, index)
        return GridSample("", wave=wave, rate=sounds.hearing.rate, bands=bands, text=self.text(source, index))


@dataclass(frozen=True)
class ClassSounds(SoundProcessor):
    """Processor of audio clips with classes.

    multiple: the padded number of frames is rounded up to a multiple of this.
    """

    multiple: int

    def find(self, option: str, path: str, progress: Progress) -> MediaRecords:
        found = find_class_records(option, path, self.columns, self.data, progress)
        if found is not None:
            return found
        return find_records(path, [Path(path)], self.columns, cache_folder(self.data), progress)

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        features, frames = stacked_bands([bands for bands, _ in samples], self.multiple)
        return {"features": features, "frames": frames, "labels": torch.tensor([label for _, label in samples])}

    def described(self, source: MediaRecords, index: int) -> str:
        return described_class(source, index)


def stacked_bands(bands: Sequence[NDArray[np.float32]], multiple: int) -> tuple[Tensor, Tensor]:
    """Return features padded with zeros, (N, M, F), and the number of frames of each clip, (N,).

    bands: features (M, frames) of each clip. multiple: F is rounded up to a multiple of this.
    """
    frames = [one.shape[1] for one in bands]
    found = np.zeros((len(bands), len(bands[0]), -(-max(frames) // multiple) * multiple), np.float32)
    for row, one in zip(found, bands, strict=True):
        row[:, : one.shape[1]] = one
    return torch.from_numpy(found), torch.tensor(frames)
