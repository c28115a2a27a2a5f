"""Cached features of frozen encoders: computed for every picture and recording before the first step, stored on disk.

The ranks of a machine share the work. Each has the full encoder: it is frozen, so sharding it would not help.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from weft.config.plan import Plan
from weft.config.run_config import RunConfig
from weft.data.media.audio import AudioTransform
from weft.data.media.audio_features import LogMel
from weft.data.media.images import Look
from weft.data.media.media_records import MediaRecords, record_files
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
from weft.train.tasks.media import MediaTask, normalised

#: Items per encoder call, and the multiple that frames are rounded up to.
_AT_ONCE, _FRAMES = 16, 16
_FILE = "encoders.json"
#: Encoders by name, and True for the encoders of sound.
_ENCODERS = {"vision": False, "sound": True}


@dataclass(frozen=True)
class Encoding:
    """The media whose features are cached. splits: items and all samples of each, by the split's name.

    encoders: the frozen encoders by name, unsharded.
    """

    config: RunConfig
    folder: RunFolder
    splits: Mapping[str, tuple[MixedItems, MixedAhead]]
    encoders: Mapping[str, nn.Module]


def frozen_encoders(model: nn.Module, config: RunConfig, options: Any) -> list[str]:
    """Return the names of the encoders whose outputs can be cached.

    Args:
        model: the task's model on the meta device.
        config: the run's config.
        options: the task's options, which include its augmentations.

    Raises:
        ConfigError: if no encoder is frozen, or the output of one changes from epoch to epoch.
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


def ready_features(asked: Encoding, forwards: Forwards) -> dict[str, list[FeatureShards]]:
    """Compute the features that are not cached yet, and return the features of each split. All ranks call it.

    Args:
        asked: the media to encode.
        forwards: the run's model before the first step.

    Raises:
        PlanError: for a dtype that one process cannot compute in.
        DataError: if a resumed run has other weights of an encoder, or the folder is not writable.
    """
    plan: Plan = forwards.plan
    if plan.precision == "fp8":
        raise PlanError("precision=fp8: data.cache_features stores encoder outputs in bf16. Use precision=bf16.")
    compute = Precision.of(plan).compute
    digests = {name: _weights_digest(one) for name, one in asked.encoders.items()}
    _refuse_other(asked.folder, digests, forwards)
    found: dict[str, list[FeatureShards]] = {split: [] for split in asked.splits}
    folder = cache_folder(asked.config.data) / "features"
    for name, encoder in asked.encoders.items():
        encoder.to(forwards.device, compute).eval()
        for split, (items, samples) in asked.splits.items():
            told = items.to_json()
            seen = [told["hearing"], told["features"]] if _ENCODERS[name] else told["look"]
            key = [name, digests[name], str(compute), seen]
            blank = _to_stored(
                _encoded(encoder, [_blank(items, is_sound=_ENCODERS[name])], forwards.device, compute)[0]
            )
            shards = FeatureShards(folder, key, items.records, is_sound=_ENCODERS[name], blank=np.zeros_like(blank))
            for shard in _own_shards(shards, forwards):
                if not shards.has(shard):
                    rows = _of_items(encoder, samples, shards.items_of(shard), forwards.device, compute)
                    shards.write(shard, list(rows))
            samples.close()
            found[split].append(shards)
        encoder.cpu()
    forwards.wait()
    return found


def features_tensor(rows: Sequence[np.ndarray], compute: torch.dtype) -> Tensor:
    """Return the rows of items as one tensor, (N, R, D), padded with zeros.

    Args:
        rows: features of each item, (R, D).
        compute: the dtype that they were computed in.
    """
    most = max(map(len, rows))
    values = np.zeros((len(rows), most, rows[0].shape[1]), rows[0].dtype)
    for own, one in zip(values, rows, strict=True):
        own[: len(one)] = one
    found = torch.from_numpy(values)
    return found.view(compute) if found.dtype != compute else found


def _own_shards(shards: FeatureShards, forwards: Forwards) -> Iterator[int]:
    """Yield this rank's shards.

    Each node begins at another shard, so nodes that share a folder find shards already written.
    """
    place = rank_env()
    rank, size = (place.local_rank, place.local_world_size) if place is not None else (forwards.rank, forwards.size)
    node, nodes = forwards.rank // size, max(1, forwards.size // size)
    own = range(rank, len(shards), size)
    first = node * len(own) // nodes
    yield from own[first:]
    yield from own[:first]


def _of_items(
    encoder: nn.Module, samples: MixedAhead, items: Sequence[int], device: torch.device, compute: torch.dtype
) -> Iterator[np.ndarray]:
    groups = [items[first : first + _AT_ONCE] for first in range(0, len(items), _AT_ONCE)]
    for group, coming in zip(groups, [*groups[1:], []], strict=True):
        media = samples.media([(0, item) for item in group], [(0, item) for item in coming])
        yield from map(_to_stored, _encoded(encoder, media, device, compute))


@torch.no_grad()
def _encoded(
    encoder: nn.Module, media: Sequence[np.ndarray], device: torch.device, compute: torch.dtype
) -> list[Tensor]:
    """Return the encoder's output, (R, D) each, for pictures (3, side, side) or mel bands (M, F)."""
    if media[0].dtype == np.uint8:
        pixels = torch.from_numpy(normalised(np.stack(media))).to(device, compute)
        return list(encoder(pixels))
    frames = torch.tensor([one.shape[1] for one in media])
    length = -(-int(frames.max()) // _FRAMES) * _FRAMES
    features = np.zeros((len(media), len(media[0]), length), np.float32)
    for row, one in zip(features, media, strict=True):
        row[:, : one.shape[1]] = one
    states = encoder(torch.from_numpy(features).to(device, compute), frames.to(device))
    return [one[:count] for one, count in zip(states, encoder_tokens(frames).tolist(), strict=True)]


def _blank(items: MixedItems, *, is_sound: bool) -> np.ndarray:
    side = items.look.side
    return np.zeros((items.bands_shape[0], _FRAMES), np.float32) if is_sound else np.zeros((3, side, side), np.uint8)


def _to_stored(rows: Tensor) -> np.ndarray:
    """Return values as files store them. numpy has no bf16, so bf16 is stored as its bits in uint16."""
    rows = rows.cpu()
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def _weights_digest(encoder: nn.Module) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, value in sorted(encoder.state_dict().items()):
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return hasher.hexdigest()


def _refuse_other(folder: RunFolder, digests: Mapping[str, str], forwards: Forwards) -> None:
    """Raise DataError if the weights of a frozen encoder differ from those that the run began with."""
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


# Base of tasks on samples of pictures, sound and text: records, their processing, and their batches.

#: Frames of a batch's recordings are rounded up to a multiple of this.
_MIXED_FRAMES = 16
#: Samples from which two typical ones are chosen.
_TYPICAL = 64


@dataclass(eq=False)
class MixedTask(MediaTask):
    """Trains on samples of text with pictures and recordings. A subclass defines the targets."""

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

    _run_folder: RunFolder | None = field(default=None, init=False, repr=False)
    _kept: Mapping[str, Sequence[FeatureShards]] = field(default_factory=dict, init=False, repr=False)
    _compute: torch.dtype = field(default=torch.float32, init=False, repr=False)

    def __post_init__(self) -> None:
        self.check_share()
        for name, least, most in (
            ("side", 8, 4096), ("grid", 2, 64), ("colour", 0.0, 0.99), ("rate", 4000, 96_000), ("mels", 8, 128),
            ("seconds", 0.1, 600.0), ("gain", 0.0, 60.0), ("noise", 0.0, 10.0), ("masks", 0, 16),
            ("text_len", 4, 2**16), ("dropout", 0.0, 0.99),
        ):  # fmt: skip
            if not least <= getattr(self, name) <= most:
                raise DataError(f"{name}={getattr(self, name)}: it is {least:g} to {most:g}. Use a number between.")
        if self.side % self.grid:
            raise DataError(f"side={self.side}: grid={self.grid} patches to a side must divide it. Use 32 and 8.")
        hears(self.model)

    # --- the samples ---

    def source(self, option: str, path: str, told: Callable[[int, int], None] | None) -> MediaRecords:
        """Find the samples of a path.

        Args:
            option: name of the option with the path.
            path: path as the user typed it.
            told: progress callback, called with (done, total).

        Raises:
            DataError: for invalid data.
        """
        files = record_files(path, SAMPLE)
        if not files:
            raise DataError(
                f"task.options.{option}={path}: there is no .tar, .jsonl or .parquet file. Give files of records, each "
                "with a text and its pictures or recordings."
            )
        columns = MixedColumns(self.text, self.picture, self.audio)
        key = (type(self).__name__, hears(self.model), self.text_len, self.seconds)
        survey = MixedSurvey(columns, self.codec, self.refused, key)
        return find_mixed(path, files, survey, cache_folder(self.config.data), told)

    def refused(self, tokens: np.ndarray, media: Sequence[tuple[bool, tuple[int, ...]]]) -> str:
        """Return the reason to leave a sample out, or "".

        Args:
            tokens: token ids of its text, with marks for media.
            media: (True for a sound, size) of each medium.
        """
        if len(tokens) - len(media) > self.text_len:
            return f"its text has {len(tokens) - len(media)} tokens, more than task.options.text_len={self.text_len}"
        for is_sound, size in media:
            if is_sound and not hears(self.model):
                return f"it has a recording, and {self.model} has no sound input; model=omni-tiny has"
            if is_sound and size[0] > self.seconds * size[1]:
                return f"a recording lasts {size[0] / size[1]:.1f} s, longer than task.options.seconds={self.seconds:g}"
        return ""

    def made(self, source: Any, split: str) -> MixedItems:
        look, hearing = Look(self.side), AudioTransform(self.rate, self.seconds)
        if split == "train":
            look = Look(self.side, self.augment, self.augment, self.colour)
            hearing = AudioTransform(self.rate, self.seconds, False, self.gain, self.noise, self.masks)
        scale = self.rate / 16_000  # windows of 25 ms, 10 ms apart
        features = LogMel(self.rate, self.mels, 2 * round(200 * scale), round(160 * scale))
        return MixedItems(source, look, hearing, features, self.config.seed)

    def samples(self, split: str) -> Any:
        return MixedAhead(self.made(self.media(split), split), self._workers(), lambda: self._kept.get(split, ()))

    # --- cached features ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Find the samples, or load the samples that the run began with.

        Raises:
            CheckpointError: if the run trains on another path.
            ConfigError: if data.cache_features is set and no encoder's output can be cached.
            DataError: for invalid data, and for other records than the run was started with.
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
        names = frozen_encoders(self.shapes(), self.config, self)
        model = self.initial_model(forwards.plan)
        splits = {}
        for split in ("train", "eval"):
            items = self.made(self.media(split), split)
            splits[split] = items, MixedAhead(items, self._workers())
        encoders: dict[str, Any] = {name: getattr(model, name) for name in names}
        self._kept = ready_features(Encoding(self.config, self._run_folder, splits, encoders), forwards)
        self._compute = Precision.of(forwards.plan).compute

    def inputs(self) -> ModelInputs:
        """Return the sizes of the model's inputs."""
        return ModelInputs(self.codec.num_ids, self.text_len, self.side, self.grid, self.mels, self.dropout)

    # --- batches ---

    def media_tensors(self, samples: Sequence[MixedSample]) -> dict[str, Tensor]:
        """Return the pictures and recordings of samples in their order, or a blank one if there are none.

        With the blank one, every rank calls every encoder in every microbatch, and no rank waits for another.

        Args:
            samples: samples of a microbatch.
        """
        kinds = [list(zip(_are_sounds(one), one.media, strict=True)) for one in samples]
        pictures = [made for own in kinds for is_sound, made in own if not is_sound]
        sounds = [made for own in kinds for is_sound, made in own if is_sound]
        kept = {shards.is_sound: shards for own in self._kept.values() for shards in own}
        found: dict[str, Tensor] = {}
        if False in kept:
            found["vision_states"] = features_tensor(pictures or [kept[False].blank], self._compute)
        else:
            blank = np.zeros((3, self.side, self.side), np.uint8)
            found["pixels"] = torch.from_numpy(normalised(np.stack(pictures or [blank])))
        if not hears(self.model):
            return found
        if True in kept:
            rows = sounds or [kept[True].blank]
            states = features_tensor(rows, self._compute)
            odd = -states.shape[1] % encoder_tokens(_MIXED_FRAMES)
            found["sound_states"] = torch.nn.functional.pad(states, (0, 0, 0, odd))
            return {**found, "frames": torch.tensor([_frames(len(one)) for one in rows])}
        sounds = sounds or [np.zeros((self.mels, _MIXED_FRAMES), np.float32)]
        frames = [made.shape[1] for made in sounds]
        length = -(-max(frames) // _MIXED_FRAMES) * _MIXED_FRAMES
        features = np.zeros((len(sounds), self.mels, length), np.float32)
        for row, made in zip(features, sounds, strict=True):
            row[:, : made.shape[1]] = made
        return {**found, "features": torch.from_numpy(features), "frames": torch.tensor(frames)}

    @staticmethod
    def num_pictures(media: Mapping[str, Tensor]) -> int:
        """Return the number of pictures that `media_tensors` returned, including a blank one."""
        return len(media["pixels"] if "pixels" in media else media["vision_states"])

    @staticmethod
    def num_frames(media: Mapping[str, Tensor]) -> int:
        """Return the padded frames of recordings in `media_tensors`, or 0 for a model without a sound encoder."""
        if "sound_states" in media:
            return _frames(media["sound_states"].shape[1])
        return media["features"].shape[-1] if "features" in media else 0

    # --- for the planner ---

    def describe(self) -> PlannedModel:
        """Describe the model by the two samples whose text, pictures and sound together are nearest to the average."""
        return describe_by_samples(_Typical(self))

    # --- text for users ---

    def name(self) -> str:
        return self.model

    def described(self, index: int, split: str = "train") -> str:
        source = self.media(split)
        return f"{source.file(index)}: {self.codec.decode_all(source.tokens(index).tolist())!r}"

    def grid_entry(self, place: int, split: str) -> GridSample:
        source, (epoch, index) = self.media(split), self.shown(place, split)
        sample = self.made(source, split)
        tokens, learnt = source.tokens(index).tolist(), source.learnt(index).tolist()
        cuts = [0, *(at for at in range(1, len(tokens)) if learnt[at] != learnt[at - 1]), len(tokens)]
        said = [(self.codec.decode_all(tokens[a:b]), float(learnt[a])) for a, b in pairwise(cuts) if a < b]
        entry = GridSample(self.grid_title(place, split), text=said)
        for item, (is_sound, _) in zip(sample.of_sample(index), source.sizes(index), strict=True):
            if is_sound and entry.bands is None:
                entry = replace(entry, bands=sample.medium(epoch, item))
            elif not is_sound and entry.picture is None:
                entry = replace(entry, picture=sample.medium(epoch, item))
        return entry


def _frames(tokens: int) -> int:
    """Return the number of frames of `tokens` tokens of the sound encoder."""
    return tokens * (_MIXED_FRAMES // encoder_tokens(_MIXED_FRAMES))


class _Typical:
    """A task whose samples are two typical ones, for tracing."""

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
    """Return the numbers of tokens, pictures and recordings of a sample."""
    sizes = records.sizes(index)
    sounds = sum(is_sound for is_sound, _ in sizes)
    return len(records.tokens(index)), len(sizes) - sounds, sounds


def _are_sounds(sample: MixedSample) -> list[bool]:
    return [bool(one == SOUND_MARK) for one in sample.tokens if one < 0]
