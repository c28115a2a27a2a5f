"""Which text belongs to which picture or recording: `task.name = "contrast"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.media.mixed import SOUND_MARK, MixedSample
from weft.errors import DataError
from weft.models.multimodal import build_media_pairs
from weft.spec.rules import Facts
from weft.spec.traced import Limit
from weft.train.step import WholeBatchLoss
from weft.train.task import Metric
from weft.train.tasks.tuned.media.mixed_task import MixedTask

_NO_PP = Limit((1,), "the loss compares all samples of the batch, which no stage of a pipeline has in time")
_WITHIN = (1, 5, 10)
#: Products of vectors of length one that differ by less are alike: a text that is there twice has one place, however
#: it rounds.
_ALIKE = 1e-6


@dataclass(eq=False)
class ContrastTask(MixedTask):
    """Trains two encoders to give near vectors to a picture, or a recording, and its text.

    data: records of a text and one picture or recording each; eval, holdout, model, side, grid, augment, colour, rate,
    mels, seconds, gain, noise, masks, text_len, dropout and columns as in caption. temperature: cosines are divided by
    it.
    """

    temperature: float = 0.07

    unit = "pairs"
    metrics = tuple(
        Metric(f"recall_at_{most}", "", f"share of the pictures or recordings whose text is among the nearest {most}")
        for most in _WITHIN
    )
    sum_names = tuple(f"within_{most}" for most in _WITHIN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise DataError(f"temperature={self.temperature}: a temperature is above 0. Use 0.07.")

    def facts(self, world_size: int) -> Facts:
        return Facts(world_size=world_size, global_batch=self.config.train.global_batch, limits={"pp": _NO_PP})

    def refused(self, tokens: np.ndarray, media: Sequence[tuple[bool, tuple[int, ...]]]) -> str:
        if len(media) != 1:
            return f"it has {len(media)} pictures and recordings, and contrast compares one with a text"
        return super().refused(tokens, media)

    def collate(self, samples: list[MixedSample]) -> dict[str, Tensor]:
        media = self.media_tensors(samples)
        texts = [[token for token in sample.tokens.tolist() if token >= 0] for sample in samples]
        ids = torch.full((len(texts), max(map(len, texts))), self.codec.pad)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        seen, heard, index = 0, self.num_pictures(media), list[int]()
        for sample in samples:
            is_sound = SOUND_MARK in sample.tokens
            index.append(heard if is_sound else seen)
            heard, seen = heard + is_sound, seen + (not is_sound)
        return {
            "input_ids": ids, "lengths": torch.tensor([len(text) for text in texts]),
            "media_index": torch.tensor(index), **media,
        }  # fmt: skip

    # --- the model ---

    def build(self) -> nn.Module:
        return build_media_pairs(self.model, self.inputs())

    def forward(self, model: Any, batch: Any) -> Any:
        """Return the vectors of pictures or recordings, and of texts."""
        return tuple(F.normalize(one if one.itemsize == 8 else one.float(), dim=-1) for one in model(**batch))

    @property
    def loss(self) -> WholeBatchLoss:  # pyright: ignore[reportIncompatibleMethodOverride] - a loss of the whole batch is an object
        return WholeBatchLoss(self._compare, self._score)

    def _compare(self, own: Any, every: Any, places: Tensor) -> tuple[Tensor, int]:
        """InfoNCE both ways: the own text among all texts, and the own picture or recording among all."""
        losses = [
            F.cross_entropy(one @ others.T / self.temperature, places, reduction="sum")
            for one, others in zip(own, reversed(every), strict=True)
        ]
        return torch.stack(losses).sum() / 2, len(places)

    def _score(self, own: Any, every: Any, places: Tensor) -> Mapping[str, Tensor]:
        """Of how many at most so many texts of the set are nearer than their own."""
        products = own[0] @ every[1].T
        nearer = (products > products.gather(1, places[:, None]) + _ALIKE).sum(1)
        return {f"within_{most}": (nearer < most).sum() for most in _WITHIN}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        count = sums["count"]
        return {f"recall_at_{most}": sums[f"within_{most}"] / count if count else None for most in _WITHIN}
