"""Classification of pictures: folders of classes, networks by name, crops that follow the sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.media import (
    ClassFolder,
    Look,
    MediaRecords,
    Pictures,
    RecordColumns,
    find_pictures,
    find_records,
    record_files,
)
from weft.data.prepared import cache_folder
from weft.errors import DataError, ModelError
from weft.models.vision import build_image_model
from weft.monitor.screen import SheetEntry
from weft.train.task import Metric
from weft.train.tasks.tuned.media.media_task import MediaTask
from weft.train.tasks.tuned.media.pixel_values import normalised


@dataclass(eq=False)
class ImageClassTask(MediaTask):
    """Trains a network to name the class of a picture.

    data: a folder with a folder of pictures for each class; or records: a file, a folder or a glob of .tar shards,
    .jsonl or .parquet files, whose columns `picture` and `label` are found by the usual names. eval: the same for
    other pictures of these classes; by default a share `holdout` of the pictures. model: resnet18, resnet34,
    resnet50, vgg11, vgg16 ("vgg16_bn": with batch norm), vit-tiny, vit-base. side: pictures become squares of so many
    pixels. augment: crop and mirror at random, by (seed, epoch, picture). colour: change brightness, contrast and
    saturation by up to this share. noise: deviation of what is added to each value of 0 to 255. weights: a
    safetensors file with torchvision's names, or those of transformers for vit-*, to start from; a head for other
    classes starts new.
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
        Metric("accuracy", "", "Share of the pictures whose class the model names."),
        Metric("top5", "", "Share of the pictures whose class is among the five that the model finds likeliest."),
    )
    sum_names = ("right", "among_five")

    def __post_init__(self) -> None:
        self.check_share()
        if self.side < 8:
            raise DataError(f"side={self.side}: pictures need at least 8 pixels to a side. Use 8 or more.")
        if not 0.0 <= self.colour < 1.0:
            raise DataError(f"colour={self.colour}: it is a share of the brightness. Use 0 or more, and less than 1.")
        if not 0.0 <= self.noise <= 255.0:
            raise DataError(f"noise={self.noise}: it is added to values of 0 to 255. Use a number between them.")

    # --- the pictures ---

    def source(self, option: str, path: str, told: Callable[[int, int], None] | None) -> ClassFolder | MediaRecords:
        """Find the pictures of a path: records where it names files of them, else folders of classes.

        Args:
            option: that names the path.
            path: as the user typed it.
            told: of (done, all).

        Raises:
            DataError: for what is wrong with the data.
        """
        files = record_files(path)
        if files:
            cache = cache_folder(self.config.data)
            return find_records(path, files, RecordColumns(self.picture, self.label), cache, told)
        if self.picture or self.label:
            name = "picture" if self.picture else "label"
            raise DataError(
                f"task.options.{name}={getattr(self, name)}: it names a column of records, and {option}={path} has no "
                ".tar, .jsonl or .parquet file. Leave it out."
            )
        return find_pictures(Path(path), told)

    def made(self, source: ClassFolder | MediaRecords, split: str) -> Pictures:
        look = Look(self.side)
        if split == "train":
            look = Look(self.side, self.augment, self.augment, self.colour, self.noise)
        return Pictures(source, look, self.config.seed)

    def sheet_entry(self, place: int, split: str) -> SheetEntry:
        source, (epoch, index) = self.media(split), self.shown(place, split)
        said = [(f"class {source.classes[source.label(index)]!r}", 1.0)]
        pixels = self.made(source, split).decoded(epoch, index)
        return SheetEntry(self.sheet_title(place, split), picture=pixels, text=said)

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        values = normalised(np.stack([pixels for pixels, _ in samples]))
        return torch.from_numpy(values), torch.tensor([label for _, label in samples])

    # --- the model ---

    def build(self) -> nn.Module:
        model = build_image_model(self.model, len(self.media("train").classes), self.side)
        if self.weights and next(model.parameters()).device.type != "meta":
            _load(model, Path(self.weights))
        return model

    def loss(self, output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return F.cross_entropy(output.float(), batch[1], reduction="sum"), len(batch[1])

    def sums(self, output: Tensor, batch: Any) -> Mapping[str, Tensor | float]:
        places = output.topk(min(5, output.shape[1])).indices == batch[1][:, None]
        return {"right": places[:, 0].sum(), "among_five": places.sum()}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        return {"accuracy": sums["right"] / sums["count"], "top5": sums["among_five"] / sums["count"]}

    # --- what people see ---

    def name(self) -> str:
        return self.model


def _load(model: nn.Module, path: Path) -> None:
    """Fill a model from published weights; a head of another size keeps its own."""
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
