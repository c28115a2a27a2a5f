"""Classification of pictures: folders of classes, networks with torchvision's names, crops that follow the sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.media import ClassFolder, Look, find_pictures, read_picture
from weft.data.order import permutation
from weft.errors import CheckpointError, DataError, ModelError
from weft.models.vision import build_image_model
from weft.train.folder import RunFolder
from weft.train.task import Metric, Report, Task
from weft.units import format_count

#: Mean and deviation of each channel over ImageNet, which published weights were trained with (0 to 255).
_MEAN, _STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_FILE = "pictures.json"


@dataclass
class ImageClassTask(Task):
    """Trains a network to name the class of a picture.

    data: a folder with a folder of pictures for each class. eval: another one with the same classes; by default a share
    `holdout` of the pictures. model: resnet18, resnet34, resnet50, vgg11, vgg16 ("vgg16_bn": with batch norm). side:
    pictures become squares of so many pixels. augment: crop and mirror at random, by (seed, epoch, picture). weights: a
    safetensors file with torchvision's names to start from; a head for other classes starts new.
    """

    data: str
    eval: str = ""
    holdout: float = 0.1
    model: str = "resnet18"
    side: int = 224
    augment: bool = True
    weights: str = ""

    unit = sample_unit = "pictures"
    metrics = (
        Metric("accuracy", "", "Share of the pictures whose class the model names."),
        Metric("top5", "", "Share of the pictures whose class is among the five that the model finds likeliest."),
    )
    sum_names = ("right", "among_five")

    _found: dict[str, ClassFolder] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.holdout < 1.0:
            raise DataError(f"holdout={self.holdout}: it is a share of the pictures. Use a number between 0 and 1.")
        if self.side < 8:
            raise DataError(f"side={self.side}: pictures need at least 8 pixels to a side. Use 8 or more.")

    # --- the pictures ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        kept = folder.path / _FILE
        if kept.exists():
            self._found = _read(kept)
            train = self._found["train"]
            if Path(self.data).absolute() != Path(train.root):
                raise CheckpointError(
                    f"task.options.data={self.data}: this run trains on {train.root}. Use it, or another run.name."
                )
            return
        self._find(report)

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        lines = [self._found[split].format() for split in ("train", "eval")]
        return {_FILE: "\n".join(lines) + "\n"}

    def open(self, folder: RunFolder) -> None:
        self._found = _read(folder.path / _FILE)

    def _find(self, report: Report | None = None) -> None:
        whole = find_pictures(Path(self.data), None if report is None else _told(report, self.data))
        if self.eval:
            held = find_pictures(Path(self.eval), None if report is None else _told(report, self.eval))
            if held.classes != whole.classes:
                odd = sorted({*held.classes} ^ {*whole.classes})
                raise DataError(
                    f"task.options.eval={self.eval}: class {odd[0]!r} is in one of the two folders only. Give both the "
                    "same classes."
                )
            self._found = {"train": whole, "eval": held}
            return
        # A pure function of the names: a picture that is added moves no other one to the other side but by chance.
        order = permutation(len(whole.paths), "held out pictures")
        count = max(1, round(self.holdout * len(whole.paths)))
        held_out = sorted(order(place) for place in range(count))
        rest = sorted({*range(len(whole.paths))} - {*held_out})
        left_out = ClassFolder(whole.root, whole.classes, (), (), whole.unreadable)
        train = whole.part(rest)
        self._found = {
            "train": ClassFolder(train.root, train.classes, train.paths, train.labels, left_out.unreadable),
            "eval": whole.part(held_out),
        }

    def _pictures(self, split: str) -> ClassFolder:
        if not self._found:
            self._find()
        return self._found[split]

    def samples(self, split: str) -> Pictures:
        look = Look(self.side, crops=self.augment, mirrors=self.augment) if split == "train" else Look(self.side)
        return Pictures(self._pictures(split), look, self.config.seed)

    def collate(self, samples: list[Any]) -> tuple[Tensor, Tensor]:
        pixels = torch.from_numpy(np.stack([pixels for pixels, _ in samples])).float()
        mean, std = torch.tensor(_MEAN).view(3, 1, 1), torch.tensor(_STD).view(3, 1, 1)
        return (pixels - mean) / std, torch.tensor([label for _, label in samples])

    # --- the model ---

    def build(self) -> nn.Module:
        model = build_image_model(self.model, len(self._pictures("train").classes), self.side)
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

    def sample_lines(self, place: int) -> Sequence[str]:
        """Say which picture it is, and of which class, beside what is made of it."""
        where, *made = super().sample_lines(place)
        pictures = self._pictures("train")
        index = int(where.split()[3])
        return [where, f"{pictures.file(index)}, class {pictures.classes[pictures.labels[index]]!r}", *made]

    def data_lines(self) -> Sequence[str]:
        train, held = self._pictures("train"), self._pictures("eval")
        lines = [
            f"{train.root}: {format_count(len(train.paths))} pictures of {len(train.classes)} classes; "
            f"{format_count(len(held.paths))} for evaluation"
        ]
        return [*lines, *(f"left out: {reason}" for reason in train.unreadable[:3])]


class Pictures:
    """Pictures and their classes by index, decoded when they are asked for."""

    def __init__(self, folder: ClassFolder, look: Look, seed: int):
        self._folder, self._look, self._seed = folder, look, seed

    def __len__(self) -> int:
        return len(self._folder.paths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.in_epoch(0, index)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int]]:
        return (self[index] for index in range(len(self)))

    def in_epoch(self, epoch: int, index: int) -> tuple[np.ndarray, int]:
        """Return a sample as it looks in an epoch."""
        key = (self._seed, epoch, index)
        return read_picture(self._folder.file(index), self._look, key), self._folder.labels[index]


def _told(report: Report, what: str) -> Any:
    return lambda done, total: report(f"looking at {what}", done, total)


def _read(path: Path) -> dict[str, ClassFolder]:
    lines = path.read_text().splitlines()
    return dict(zip(("train", "eval"), map(ClassFolder.parse, lines), strict=True))


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
