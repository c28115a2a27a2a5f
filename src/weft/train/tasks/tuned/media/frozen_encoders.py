"""What frozen encoders give of every picture and recording of a run, computed before the first step and kept on disk.

The ranks of a machine share the work, each with the encoder whole: it is frozen, so a plan has nothing to add to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.data.media.mixed import FeatureShards, MixedAhead, MixedItems
from weft.data.prepared import cache_folder
from weft.env import rank_env
from weft.errors import ConfigError, DataError, PlanError, Problem
from weft.models.multimodal import encoder_tokens
from weft.optim import freeze
from weft.parallel import Precision
from weft.spec import RunConfig
from weft.spec.plan import Plan
from weft.train.folder import RunFolder, free_name
from weft.train.task import Forwards
from weft.train.tasks.tuned.media.pixel_values import normalised

#: Items that go through an encoder at once, and what frames are rounded up to.
_AT_ONCE, _FRAMES = 16, 16
_FILE = "encoders.json"
#: Names of the encoders, and whether they are of sound.
_ENCODERS = {"vision": False, "sound": True}


@dataclass(frozen=True)
class Encoding:
    """What is kept of a run's media. splits: items and all samples of each by the split's name.

    weights: of the frozen encoders, by name, whole.
    """

    config: RunConfig
    folder: RunFolder
    splits: Mapping[str, tuple[MixedItems, MixedAhead]]
    encoders: Mapping[str, nn.Module]


def frozen_encoders(model: nn.Module, config: RunConfig, options: Any) -> list[str]:
    """Return the names of the encoders whose outputs can be kept.

    Args:
        model: shapes of the task's model.
        config: of the run.
        options: of the task: what it changes at random.

    Raises:
        ConfigError: where no encoder is frozen, or what one gives changes from epoch to epoch.
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
            "no encoder is frozen, so what it gives changes with every step. Freeze it, such as with "
            'optimizer.groups = [{match = "vision.*", lr = 0}], or leave data.cache_features out.'
        )
    changing = {"vision": ("augment", "colour"), "sound": ("gain", "noise", "masks")}
    for name in [*(option for one in found for option in changing[one]), "dropout"]:
        if value := getattr(options, name):
            said, off = ("true", "false") if value is True else (f"{value:g}", "0")
            raise _refused(
                f"task.options.{name}={said} changes what the encoder gives from epoch to epoch. Use {name}={off}, or "
                "leave data.cache_features out."
            )
    return found


def ready_features(asked: Encoding, forwards: Forwards) -> dict[str, list[FeatureShards]]:
    """Compute what is not kept yet, and return the features of each split. All ranks call it.

    Args:
        asked: what is kept.
        forwards: of the run's model before the first step.

    Raises:
        PlanError: for a format of numbers that one process cannot give.
        DataError: where a run goes on with other weights of an encoder, or the folder takes no files.
    """
    plan: Plan = forwards.plan
    if plan.precision == "fp8":
        raise PlanError("precision=fp8: data.cache_features keeps what encoders give in bf16. Use precision=bf16.")
    compute = Precision.of(plan).compute
    digests = {name: _weights_digest(one) for name, one in asked.encoders.items()}
    _refuse_other(asked.folder, digests, forwards)
    found: dict[str, list[FeatureShards]] = {split: [] for split in asked.splits}
    folder = cache_folder(asked.config.data) / "features"
    for name, encoder in asked.encoders.items():
        encoder.to(forwards.device, compute).eval()
        for split, (items, samples) in asked.splits.items():
            told = items.told()
            seen = [told["hearing"], told["features"]] if _ENCODERS[name] else told["look"]
            key = [name, digests[name], str(compute), seen]
            blank = _kept(_encoded(encoder, [_blank(items, is_sound=_ENCODERS[name])], forwards.device, compute)[0])
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
    """Return rows of items as a model takes them: (N, R, D), filled up with zeros.

    Args:
        rows: of each item, (R, D).
        compute: the format that they were computed in.
    """
    most = max(map(len, rows))
    values = np.zeros((len(rows), most, rows[0].shape[1]), rows[0].dtype)
    for own, one in zip(values, rows, strict=True):
        own[: len(one)] = one
    found = torch.from_numpy(values)
    return found.view(compute) if found.dtype != compute else found


def _own_shards(shards: FeatureShards, forwards: Forwards) -> Iterator[int]:
    """Every so many-th, beginning elsewhere on each machine: those that share a folder find the work of others done."""
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
        yield from map(_kept, _encoded(encoder, media, device, compute))


@torch.no_grad()
def _encoded(
    encoder: nn.Module, media: Sequence[np.ndarray], device: torch.device, compute: torch.dtype
) -> list[Tensor]:
    """What the encoder gives of pictures (3, side, side) or bands (M, F), (R, D) each."""
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


def _kept(rows: Tensor) -> np.ndarray:
    """Numbers as files hold them: numpy has no bf16, so its bits stand there."""
    rows = rows.cpu()
    return (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def _weights_digest(encoder: nn.Module) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, value in sorted(encoder.state_dict().items()):
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        hasher.update(memoryview(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()))
    return hasher.hexdigest()


def _refuse_other(folder: RunFolder, digests: Mapping[str, str], forwards: Forwards) -> None:
    """DataError where a checkpoint would bring other weights of a frozen encoder than those that are kept here."""
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
