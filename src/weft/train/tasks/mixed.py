"""Base of tasks on images, audio clips and text (`MixedTask`), and cached outputs of frozen encoders (`FeatureCache`).

The outputs are computed for every image and audio clip before the first step, and stored on disk. The ranks of a
machine share the work. Each rank has the full encoder, because frozen encoders need little memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from weft.config.run_config import DataSection, RunConfig
from weft.data.media.audio import AudioTransform
from weft.data.media.audio_features import LogMel
from weft.data.media.images import Look
from weft.data.media.media_records import record_files
from weft.data.media.mixed_items import MixedAhead, MixedItems, MixedSample
from weft.data.media.mixed_records import FeatureShards, MixedRecords, MixedSurvey, find_mixed
from weft.data.media.mixed_samples import SOUND_MARK, ByteText, MixedColumns
from weft.data.media.records import SAMPLE
from weft.data.store.prepare import cache_folder
from weft.env import rank_env
from weft.errors import ConfigError, DataError, PlanError, Problem
from weft.models.multimodal import ModelInputs, encoder_tokens, hears
from weft.monitor.plots import GridSample
from weft.optim.build import freeze
from weft.parallel.state.precision import Precision
from weft.planner.search.model_source import PlannedModel
from weft.train.folder import RunFolder, free_name
from weft.train.tasks.base import Report
from weft.train.tasks.description import Forwards, describe_by_samples
from weft.train.tasks.media import MediaTask, Progress, normalised, stacked_bands

#: Items per encoder call, and the multiple to which the frames of audio clips are rounded up.
_AT_ONCE, _FRAMES = 16, 16
_FILE = "encoders.json"
#: Names of the encoders, with True for audio encoders.
_ENCODERS = {"vision": False, "sound": True}

Splits = Mapping[str, tuple[MixedItems, MixedAhead]]


class FeatureCache:
    """Cached outputs of a task's frozen encoders. It is empty until `fill`."""

    def __init__(self) -> None:
        #: Features of each encoder, by the split's name.
        self.shards: Mapping[str, Sequence[FeatureShards]] = {}
        self._compute = torch.float32

    def fill(
        self, config: RunConfig, folder: RunFolder, splits: Splits, encoders: Mapping[str, nn.Module], ranks: Forwards
    ) -> None:
        """Compute the features that are not stored yet. All ranks must call it.

        The encoders are set to evaluation mode, cast to the plan's dtype, and moved to the device and back to the CPU.

        Args:
            config: the run's config.
            folder: the run's folder.
            splits: items and samples by name of the split.
            encoders: the frozen encoders by name, unsharded.
            ranks: the run's model on all ranks, before the first step.

        Raises:
            PlanError: for precision=fp8.
            DataError: if an encoder has other weights than when the run was started, or the folder is not writable.
        """
        if ranks.plan.precision == "fp8":
            raise PlanError("precision=fp8: data.cache_features stores encoder outputs in bf16. Use precision=bf16.")
        self._compute = Precision.of(ranks.plan).compute
        digests = {name: _weights_digest(one) for name, one in encoders.items()}
        _refuse_other(folder, digests, ranks)
        found: dict[str, list[FeatureShards]] = {split: [] for split in splits}
        for name, encoder in encoders.items():
            encoder.to(ranks.device, self._compute).eval()
            for split, (items, samples) in splits.items():
                is_sound, path = _ENCODERS[name], cache_folder(config.data) / "features"
                transforms, side, num_mels = items.to_json(), items.look.side, items.bands_shape[0]
                seen = [transforms["hearing"], transforms["features"]] if is_sound else transforms["look"]
                key = [name, digests[name], str(self._compute), seen]
                empty = np.zeros((num_mels, _FRAMES), np.float32) if is_sound else np.zeros((3, side, side), np.uint8)
                blank = _to_stored(self._encoded(encoder, [empty], ranks.device)[0])
                shards = FeatureShards(path, key, items.records, is_sound=is_sound, blank=np.zeros_like(blank))
                for shard in _own_shards(shards, ranks):
                    if not shards.has(shard):
                        rows = self._of_items(encoder, samples, shards.items_of(shard), ranks.device)
                        shards.write(shard, list(rows))
                samples.close()
                found[split].append(shards)
            encoder.cpu()
        ranks.wait()
        self.shards = found

    def of(self, split: str) -> Sequence[FeatureShards]:
        """Return the features of a split."""
        return self.shards.get(split, ())

    def blank(self, *, is_sound: bool) -> np.ndarray | None:
        """Return substitute features (zeros) for a batch without images (or audio clips).

        Return None if the outputs of that encoder are not cached.
        """
        found = (shards.blank for own in self.shards.values() for shards in own if shards.is_sound == is_sound)
        return next(found, None)

    def tensor(self, rows: Sequence[np.ndarray]) -> Tensor:
        """Return the features of items as one tensor, (N, R, D), padded with zeros.

        rows: features of each item, (R, D), with different R.
        """
        values = np.zeros((len(rows), max(map(len, rows)), rows[0].shape[1]), rows[0].dtype)
        for own, one in zip(values, rows, strict=True):
            own[: len(one)] = one
        found = torch.from_numpy(values)
        return found.view(self._compute) if found.dtype != self._compute else found

    def _of_items(
        self, encoder: nn.Module, samples: MixedAhead, items: Sequence[int], device: torch.device
    ) -> Iterator[np.ndarray]:
        groups = [items[first : first + _AT_ONCE] for first in range(0, len(items), _AT_ONCE)]
        for group, coming in zip(groups, [*groups[1:], []], strict=True):
            media = samples.media([(0, item) for item in group], [(0, item) for item in coming])
            yield from map(_to_stored, self._encoded(encoder, media, device))

    @torch.no_grad()
    def _encoded(self, encoder: nn.Module, media: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
        """Return the encoder's output per item, (R, D), for images (3, side, side) or mel bands (M, F)."""
        if media[0].dtype == np.uint8:
            return list(encoder(torch.from_numpy(normalised(np.stack(media))).to(device, self._compute)))
        features, frames = stacked_bands(media, _FRAMES)
        states = encoder(features.to(device, self._compute), frames.to(device))
        return [one[:count] for one, count in zip(states, encoder_tokens(frames).tolist(), strict=True)]


def frozen_encoders(model: nn.Module, config: RunConfig, options: Any) -> list[str]:
    """Return the names of the encoders whose outputs can be cached: those without trained parameters.

    Args:
        model: the task's model on the meta device. Parameters that the config's optimizer groups freeze are frozen.
        config: the run's config.
        options: the task's options, which include its augmentations.

    Raises:
        ConfigError: if no encoder is frozen, if outputs change from epoch to epoch because of augmentation or dropout,
            or if the run has an adapter.
    """
    if config.adapter.rank:
        raise _refused("adapters train within the encoders. Leave one of the two out.")
    freeze(model, config.optimizer)
    own = {name: getattr(model, name, None) for name in _ENCODERS}
    found = [
        name for name, one in own.items() if one is not None and not any(p.requires_grad for p in one.parameters())
    ]
    if not found:
        raise _refused(
            "no encoder is frozen, so outputs change with every step. Freeze it, such as with "
            'optimizer.groups = [{match = "vision.*", lr = 0}], or leave data.cache_features out.'
        )
    changing = {"vision": ("augment", "colour"), "sound": ("gain", "noise", "masks")}
    for name in [*(option for one in found for option in changing[one]), "dropout"]:
        if value := getattr(options, name):
            said, off = ("true", "false") if value is True else (f"{value:g}", "0")
            raise _refused(
                f"task.options.{name}={said} changes the encoder's outputs from epoch to epoch. Use {name}={off}, or "
                "leave data.cache_features out."
            )
    return found


def _own_shards(shards: FeatureShards, forwards: Forwards) -> Iterator[int]:
    """Yield the indices of this rank's shards.

    Each node begins at a different shard, so that nodes with a common folder find shards that others have written.
    """
    place = rank_env()
    rank, size = (place.local_rank, place.local_world_size) if place is not None else (forwards.rank, forwards.size)
    node, nodes = forwards.rank // size, max(1, forwards.size // size)
    own = range(rank, len(shards), size)
    first = node * len(own) // nodes
    yield from own[first:]
    yield from own[:first]


def _to_stored(rows: Tensor) -> np.ndarray:
    """Return values as a numpy array. numpy has no bf16, so the bits of bf16 become uint16."""
    rows = rows.cpu()
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def _weights_digest(encoder: nn.Module) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, value in sorted(encoder.state_dict().items()):
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return hasher.hexdigest()


def _refuse_other(folder: RunFolder, digests: Mapping[str, str], forwards: Forwards) -> None:
    """Raise DataError if the weights of a frozen encoder differ from those that the run was started with.

    A new run stores their digests in the run folder.
    """
    path = folder.path / _FILE

    def same() -> bool:
        try:
            begun = json.loads(path.read_text())
        except (OSError, ValueError):
            begun = None
        if begun is None:
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(json.dumps(dict(digests)) + "\n")
            os.replace(draft, path)
        return begun is None or begun == dict(digests)

    if not forwards.on_first(same):
        raise DataError(
            f"data.cache_features=true: the frozen encoders are not those that the run in {str(folder.path)!r} began "
            f"with. Use {free_name(folder)} for a new run, or bring the old weights back to resume."
        )


def _refused(why: str) -> ConfigError:
    return ConfigError([Problem("data.cache_features", f"data.cache_features=true: {why}")])


# Base of tasks on samples of images, audio and text: records, processing, and batches.

#: Number of samples from which two typical ones are chosen.
_TYPICAL = 64


@dataclass(eq=False)
class MixedTask(MediaTask):
    """Trains on samples of text with images and audio clips. A subclass defines the model and the loss.

    The options are as in `CaptionTask`.
    """

    data: str
    eval: str = ""
    holdout: float = 0.1
    model: str = "vlm-tiny"
    side: int = 32
    grid: int = 8
    augment: bool = True
    colour: float = 0.0
    rate: int = 16_000
    mels: int = 40
    seconds: float = 10.0
    gain: float = 0.0
    noise: float = 0.0
    masks: int = 0
    text_len: int = 256
    dropout: float = 0.0
    picture: str = ""
    audio: str = ""
    text: str = ""

    sample_unit = "samples"
    media_file = "samples.json"
    codec = ByteText()
    sections = (*MediaTask.sections, "data.cache_features")
    #: Number of images and audio clips per sample, or None for any number.
    num_media: ClassVar[int | None] = None

    _run_folder: RunFolder | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.check_ranges(
            side=(8, 4096), grid=(2, 64), colour=(0.0, 0.99), rate=(4000, 96_000), mels=(8, 128),
            seconds=(0.1, 600.0), gain=(0.0, 60.0), noise=(0.0, 10.0), masks=(0, 16), text_len=(4, 2**16),
            dropout=(0.0, 0.99),
        )  # fmt: skip
        if self.side % self.grid:
            raise DataError(f"side={self.side}: grid={self.grid} patches to a side must divide it. Use 32 and 8.")
        hears(self.model)

    # --- the samples ---

    @cached_property
    def processor(self) -> MixedProcessor:
        limits = MixedLimits(self.model, self.text_len, self.seconds, self.num_media)
        survey = MixedSurvey(
            MixedColumns(self.text, self.picture, self.audio), self.codec, limits.refuse,
            (type(self).__name__, hears(self.model), self.text_len, self.seconds),
        )  # fmt: skip
        look = Look(self.side, self.augment, self.augment, self.colour)
        hearing = AudioTransform(self.rate, self.seconds, False, self.gain, self.noise, self.masks)
        features = LogMel.at_rate(self.rate, self.mels)
        return MixedProcessor(look, hearing, features, survey, self.config.data, self.config.seed, hears(self.model))

    def samples(self, split: str) -> Any:
        processor = self.processor
        return MixedAhead(
            processor.decoded(self.media(split), split), self.num_workers(), lambda: processor.cache.of(split)
        )

    # --- cached features ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Find the samples, or load the list of samples that the run began with.

        Raises:
            CheckpointError: if the run trains on another path.
            ConfigError: if data.cache_features is set and no encoder's output can be cached.
            DataError: if the data is invalid, or has changed since the run was started.
        """
        if self.config.data.cache_features:
            frozen_encoders(self.shapes(), self.config, self)
        super().prepare(folder, report)

    def open(self, folder: RunFolder) -> None:
        self._run_folder = folder
        super().open(folder)

    def begin(self, forwards: Forwards) -> None:
        if not self.config.data.cache_features:
            return
        assert self._run_folder is not None
        names, model = frozen_encoders(self.shapes(), self.config, self), self.initial_model(forwards.plan)
        items = {split: self.processor.decoded(self.media(split), split) for split in ("train", "eval")}
        splits = {split: (own, MixedAhead(own, self.num_workers())) for split, own in items.items()}
        encoders: dict[str, Any] = {name: getattr(model, name) for name in names}
        self.processor.cache.fill(self.config, self._run_folder, splits, encoders, forwards)

    def inputs(self) -> ModelInputs:
        """Return the sizes of the model's inputs."""
        return ModelInputs(self.codec.num_ids, self.text_len, self.side, self.grid, self.mels, self.dropout)

    # --- for the planner and users ---

    def describe(self) -> PlannedModel:
        """Describe the model for the planner, by a trace with two typical samples.

        Of the first 64 samples, these two have numbers of tokens, images and audio clips closest to the average.
        """
        return describe_by_samples(_Typical(self))

    def name(self) -> str:
        return self.model


@dataclass(frozen=True)
class MixedLimits:
    """Limits of a sample. num_media: allowed number of images and audio clips, or None for any number."""

    model: str
    text_len: int
    seconds: float
    num_media: int | None

    def refuse(self, tokens: np.ndarray, media: Sequence[tuple[bool, tuple[int, ...]]]) -> str:
        """Return the reason to skip a sample, or "".

        tokens: token ids of its text, with placeholders for media. media: (True for an audio clip, size) per medium.
        """
        if self.num_media is not None and len(media) != self.num_media:
            return f"it has {len(media)} images and audio clips, and contrast compares one with a text"
        if len(tokens) - len(media) > self.text_len:
            return f"its text has {len(tokens) - len(media)} tokens, more than task.options.text_len={self.text_len}"
        for is_sound, size in media:
            if is_sound and not hears(self.model):
                return f"it has an audio clip, and {self.model} has no audio input; model=omni-tiny has"
            if is_sound and size[0] > self.seconds * size[1]:
                return f"a clip lasts {size[0] / size[1]:.1f} s, longer than task.options.seconds={self.seconds:g}"
        return ""


@dataclass(frozen=True)
class MixedProcessor:
    """Processor of text with images and audio clips.

    Attributes:
        look, hearing: transforms of images and audio in training.
        survey: settings for reading records.
        hears: True if the model has an audio input.
        cache: features of frozen encoders, which replace the media.
    """

    look: Look
    hearing: AudioTransform
    features: LogMel
    survey: MixedSurvey
    data: DataSection
    seed: int
    hears: bool
    cache: FeatureCache = field(default_factory=FeatureCache)

    def find(self, option: str, path: str, progress: Progress) -> MixedRecords:
        files = record_files(path, SAMPLE)
        if not files:
            raise DataError(
                f"task.options.{option}={path}: there is no .tar, .jsonl or .parquet file. Give files of records, each "
                "with a text and its images or audio clips."
            )
        return find_mixed(path, files, self.survey, cache_folder(self.data), progress)

    def decoded(self, source: MixedRecords, split: str) -> MixedItems:
        look, hearing = self.look, self.hearing
        if split != "train":
            look, hearing = Look(look.side), AudioTransform(hearing.rate, hearing.seconds)
        return MixedItems(source, look, hearing, self.features, self.seed)

    def collate(self, samples: Sequence[MixedSample]) -> dict[str, Tensor]:
        """Return the images and audio clips of samples in order, or their cached features.

        If no sample has an image (or audio clip), a blank one is returned, so that every rank calls every encoder in
        every microbatch, and no rank waits for another.
        """
        media = [
            (bool(mark == SOUND_MARK), made)
            for one in samples
            for mark, made in zip((mark for mark in one.tokens if mark < 0), one.media, strict=True)
        ]
        pictures, sounds = ([made for is_sound, made in media if is_sound == kind] for kind in (False, True))
        found: dict[str, Tensor] = {}
        if (blank := self.cache.blank(is_sound=False)) is not None:
            found["vision_states"] = self.cache.tensor(pictures or [blank])
        else:
            blank = np.zeros((3, self.look.side, self.look.side), np.uint8)
            found["pixels"] = torch.from_numpy(normalised(np.stack(pictures or [blank])))
        if not self.hears:
            return found
        if (blank := self.cache.blank(is_sound=True)) is not None:
            rows = sounds or [blank]
            states = self.cache.tensor(rows)
            odd = -states.shape[1] % encoder_tokens(_FRAMES)
            found["sound_states"] = torch.nn.functional.pad(states, (0, 0, 0, odd))
            return {**found, "frames": torch.tensor([_frames(len(one)) for one in rows])}
        sounds = sounds or [np.zeros((self.features.mels, _FRAMES), np.float32)]
        features, frames = stacked_bands(sounds, _FRAMES)
        return {**found, "features": features, "frames": frames}

    def described(self, source: MixedRecords, index: int) -> str:
        return f"{source.file(index)}: {self.survey.codec.decode_all(source.tokens(index).tolist())!r}"

    def preview(self, source: MixedRecords, split: str, epoch: int, index: int) -> GridSample:
        sample = self.decoded(source, split)
        tokens, learnt = source.tokens(index).tolist(), source.learnt(index).tolist()
        cuts = [0, *(at for at in range(1, len(tokens)) if learnt[at] != learnt[at - 1]), len(tokens)]
        said = [(self.survey.codec.decode_all(tokens[a:b]), float(learnt[a])) for a, b in pairwise(cuts) if a < b]
        entry = GridSample("", text=said)
        for item, (is_sound, _) in zip(sample.of_sample(index), source.sizes(index), strict=True):
            if is_sound and entry.bands is None:
                entry = replace(entry, bands=sample.medium(epoch, item))
            elif not is_sound and entry.picture is None:
                entry = replace(entry, picture=sample.medium(epoch, item))
        return entry


def num_pictures(media: Mapping[str, Tensor]) -> int:
    """Return the number of images of a batch of `MixedProcessor`, including a blank one."""
    return len(media["pixels"] if "pixels" in media else media["vision_states"])


def num_frames(media: Mapping[str, Tensor]) -> int:
    """Return the padded number of frames of a batch's audio clips, or 0 for a model without an audio encoder."""
    if "sound_states" in media:
        return _frames(media["sound_states"].shape[1])
    return media["features"].shape[-1] if "features" in media else 0


def _frames(tokens: int) -> int:
    return tokens * (_FRAMES // encoder_tokens(_FRAMES))


class _Typical:
    """A task with only two typical samples, for tracing."""

    sample_unit: ClassVar[str] = MixedTask.sample_unit

    def __init__(self, task: MixedTask):
        self._task, self.config = task, task.config
        self.name, self.shapes, self.collate = task.name, task.shapes, task.collate

    def samples(self, split: str) -> Any:
        records: MixedRecords = self._task.media(split)
        every = min(len(records), _TYPICAL)
        if every < 2:
            return [None] * every
        counts = np.array([_counts(records, index) for index in range(every)], float)
        wanted, scale = counts.mean(0), np.maximum(counts.mean(0), 1e-9)
        best = min(
            combinations(range(every), 2),
            key=lambda two: float((np.abs((counts[two[0]] + counts[two[1]]) / 2 - wanted) / scale).sum()),
        )
        samples = self._task.samples(split)
        return [samples[index] for index in best]


def _counts(records: MixedRecords, index: int) -> tuple[int, int, int]:
    sizes = records.sizes(index)
    sounds = sum(is_sound for is_sound, _ in sizes)
    return len(records.tokens(index)), len(sizes) - sounds, sounds
