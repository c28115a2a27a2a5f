"""Tasks on samples of text, images and audio: captioning with generation in evaluations, and contrastive training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.config.rules.rule import Facts
from weft.config.shapes.traced_model import Limit
from weft.data.media.mixed_items import MixedSample
from weft.data.media.mixed_records import MixedRecords
from weft.data.media.mixed_samples import PICTURE_MARK, SOUND_MARK
from weft.errors import DataError
from weft.models.multimodal import build_media_decoder, build_media_pairs, encoder_tokens, sound_tokens
from weft.optim.build import freeze
from weft.parallel.pipeline.runtime import pipeline_of
from weft.train.batches.batching_by_cost import TokenCosts
from weft.train.losses import GlobalBatchLoss
from weft.train.tasks.base import Metric
from weft.train.tasks.decoder_loss import IGNORE, token_cross_entropy
from weft.train.tasks.description import Forwards
from weft.train.tasks.mixed import MixedTask, frozen_encoders, num_frames, num_pictures

#: Number of generated tokens between two checks whether every text has ended.
LOOK_EVERY = 8


def any_goes_on(forwards: Forwards | None, has_ended: Tensor) -> bool:
    """Return True if a text of any rank has not ended. All ranks must call it.

    Args:
        forwards: sums over the ranks; None makes the result True.
        has_ended: bool (B,), True for each text of this rank that has ended.
    """
    if forwards is None:
        return True
    return bool(forwards.total((~has_ended).sum(dtype=torch.float64)) > 0)


# Generation of text from images and audio: `task.name = "caption"`, and `"transcribe"` without a pretrained model.

#: The length of a batch is rounded up to a multiple of this many tokens.
_MULTIPLE = 8
#: Cost of a frozen encoder relative to a trained one: it runs forward but no backward.
_FORWARD_ALONE = 1 / 3


@dataclass(eq=False)
class CaptionTask(MixedTask):
    """Trains a small model to generate text conditioned on images, audio and text.

    Attributes:
        data: records: a file, a folder or a glob of .tar shards, .jsonl or .parquet files; each has a text with any
            number of images and audio clips, or a chat with placeholders for them.
        eval: records for evaluation; by default a share `holdout` of `data`.
        model: vlm-tiny (images), omni-tiny (images and audio).
        side, grid: side of an image in pixels and in patches.
        augment: crop and flip images at random.
        colour: change brightness, contrast and saturation by up to this share.
        rate, mels: sampling rate in Hz and number of mel bands.
        seconds: longer audio clips are skipped.
        gain, noise, masks: audio augmentation, as in classify_audio.
        text_len: maximum tokens (bytes) of a text.
        dropout: dropout rate in the encoders.
        generate: maximum tokens to generate per text in evaluations; 0 disables it.
        picture, audio, text: names of the columns; "" finds the usual names.
    """

    generate: int = 32

    unit = "tokens"
    metrics = (
        Metric("token_accuracy", "", "teacher-forced token accuracy"),
        Metric("character_error_rate", "", "letters to change in what the model writes, for each that is right"),
        Metric("accuracy", "", "share of the texts that the model writes without a wrong letter"),
    )
    sum_names = ("named", "edits", "letters", "right", "texts")
    sections = (*MixedTask.sections, "data.batching", "data.microbatch_cost")
    fills_seq_len = False

    _forwards: Forwards | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.generate <= 2**16:
            raise DataError(f"generate={self.generate}: it is a number of tokens. Use 0 to 65536.")

    # --- batches ---

    def collate(self, samples: list[MixedSample]) -> dict[str, Tensor]:
        media = self.processor.collate(samples)
        rows = [(self.grid // 2) ** 2, sound_tokens(num_frames(media))]
        first = [0, rows[0] * num_pictures(media)]
        laid = [self._laid(sample, rows, first, media) for sample in samples]
        length = -(-max(len(ids) for ids, _, _ in laid) // _MULTIPLE) * _MULTIPLE
        found = {
            name: torch.full((len(samples), length), blank)
            for name, blank in (("input_ids", self.codec.pad), ("media_index", -1), ("labels", IGNORE))
        }
        for number, columns in enumerate(laid):
            for values, column in zip(found.values(), columns, strict=True):
                values[number, : len(column)] = torch.tensor(column)
        return {**found, **media}

    def _laid(
        self, sample: MixedSample, rows: Sequence[int], first: list[int], media: Mapping[str, Tensor]
    ) -> tuple[list[int], list[int], list[int]]:
        """Return the ids, media row indices (-1 for text) and labels of a sample.

        first: row indices of the next image and of the next audio clip, advanced in place. rows: rows of an image and
            of a padded audio clip.
        """
        ids: list[int] = []
        index: list[int] = []
        own: list[int] = []
        for token, counts in zip(sample.tokens.tolist(), sample.learnt.tolist(), strict=True):
            if token >= 0:
                ids, index, own = [*ids, token], [*index, -1], [*own, token if counts else IGNORE]
                continue
            kind = int(token != PICTURE_MARK)
            count = rows[0]
            if kind:
                number = (first[1] - rows[0] * num_pictures(media)) // rows[1]
                count = int(sound_tokens(media["frames"][number]))
            ids += [self.codec.pad] * count
            index += range(first[kind], first[kind] + count)
            own += [IGNORE] * count
            first[kind] += rows[kind]
        return ids, index, [*own[1:], IGNORE]

    def nominal_count(self) -> int:
        return self.config.train.global_batch * self.text_len // 4

    # --- cost of samples ---

    def lengths(self) -> np.ndarray:
        """Return the padded tokens of each sample, including its images and audio clips: int64 (samples,)."""
        records: MixedRecords = self.media("train")
        owners, is_sound, frames = self._media_frames()
        each = np.where(is_sound, sound_tokens(frames), (self.grid // 2) ** 2)
        # The placeholder of each image or clip is already counted as one token.
        found = records.token_counts() + np.bincount(owners, each - 1, len(records)).astype(np.int64)
        return -(-found // _MULTIPLE) * _MULTIPLE

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        costs = self._text_costs(self.shapes())
        return costs.work(lengths) / costs.work(1)

    def extra_costs(self) -> np.ndarray:
        """Return the encoders' cost for the images and audio clips of each sample, in text tokens: float64 (samples,).

        A frozen encoder costs a third of a trained one, and nothing if its outputs are cached.
        """
        model, (owners, is_sound, frames) = self.shapes(), self._media_frames()
        freeze(model, self.config.optimizer)
        kept = frozen_encoders(model, self.config, self) if self.config.data.cache_features else ()
        found = np.zeros(len(owners))
        counts = {"vision": np.full(len(owners), self.grid**2), "sound": encoder_tokens(frames)}
        for name, tokens in counts.items():
            tower: Any = getattr(model, name)
            if tower is None or name in kept:
                continue
            costs = TokenCosts.of(tower, len(tower.blocks), tower.norm.normalized_shape[0])
            is_trained = any(param.requires_grad for param in tower.parameters())
            work = costs.work(tokens) * (1.0 if is_trained else _FORWARD_ALONE)
            found += np.where(is_sound == (name == "sound"), work, 0.0)
        found /= float(self._text_costs(model).work(1))
        return np.bincount(owners, found, len(self.media("train")))

    def _text_costs(self, model: Any) -> TokenCosts:
        return TokenCosts.of(model.text, model.text.spec.num_layers, model.text.spec.dim)

    def _media_frames(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return, per image or clip, its sample index, True for an audio clip, and its frames (1 for an image)."""
        owners, sizes = self.media("train").media_sizes()
        is_sound, hop = sizes[:, 0] > 0, round(self.rate / 100)
        seconds = np.where(is_sound, sizes[:, 1] / np.maximum(1, sizes[:, 2]), 0.0)
        return owners, is_sound, np.maximum(1, (seconds * self.rate).astype(np.int64) // hop)

    # --- the model ---

    def build(self) -> nn.Module:
        return build_media_decoder(self.model, self.inputs())

    def begin(self, forwards: Forwards) -> None:
        super().begin(forwards)
        self._forwards = forwards

    def forward(self, model: Any, batch: Any) -> Any:
        """Return logits, or in evaluation mode with `generate` (logits, generated tokens).

        Under pipeline parallelism, nothing is generated.
        """
        logits = super().forward(model, batch)
        if model.training or not self.generate or pipeline_of(model) is not None:
            return logits
        return logits, self.written(model, batch)

    @torch.no_grad()
    def written(self, model: Any, batch: Any) -> Tensor:
        """Return tokens that the model generates greedily in place of each labeled text, (B, at most `generate`).

        All ranks call the model the same number of times. If the weights are sharded, each call is a collective.
        """
        labels, rows = batch["labels"], torch.arange(len(batch["labels"]), device=batch["labels"].device)
        starts = (labels != IGNORE).int().argmax(1) + 1
        ids, index = (
            nn.functional.pad(batch[name], (0, self.generate), value=blank)
            for name, blank in (("input_ids", self.codec.pad), ("media_index", -1))
        )
        places = torch.arange(ids.shape[1], device=ids.device)
        ids = ids.masked_fill((places >= starts[:, None]) & (index < 0), self.codec.pad)
        index = index.masked_fill(places >= starts[:, None], -1)
        has_ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        found: list[Tensor] = []
        for step in range(self.generate):
            asked = {**batch, "input_ids": ids, "media_index": index}
            logits = super().forward(model, asked)
            said = logits[rows, starts + step - 1].argmax(-1).masked_fill(has_ended, self.codec.end)
            found.append(said)
            has_ended = has_ended | (said == self.codec.end) | (said == self.codec.turn_end)
            if step % LOOK_EVERY == LOOK_EVERY - 1 and not any_goes_on(self._forwards, has_ended):
                break
            ids = ids.index_put((rows, starts + step), said)
        return torch.stack(found, 1)

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return token_cross_entropy(output[0] if isinstance(output, tuple) else output, batch)

    def sums(self, output: Any, batch: Any) -> Mapping[str, Tensor | float]:
        logits, written = output if isinstance(output, tuple) else (output, None)
        labels = batch["labels"]
        edits = letters = right = 0
        for row, said in enumerate(() if written is None else written.tolist()):
            learnt = labels[row].tolist()
            begins = next((place for place, one in enumerate(learnt) if one != IGNORE), len(learnt))
            true = self.codec.text([one for one in learnt[begins:] if one != IGNORE])
            wrong = edit_distance(self.codec.text(said), true)
            edits, letters, right = edits + wrong, letters + len(true), right + (wrong == 0)
        texts = 0 if written is None else len(written)
        return {
            "named": (logits.argmax(-1) == labels).sum(), "edits": float(edits), "letters": float(letters),
            "right": float(right), "texts": float(texts),
        }  # fmt: skip

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        def share(one: str, of: str) -> float | None:
            return sums[one] / sums[of] if sums[of] else None

        return {
            "token_accuracy": share("named", "count"),
            "character_error_rate": share("edits", "letters"),
            "accuracy": share("right", "texts"),
        }


# Contrastive training of images or audio clips and their texts: `task.name = "contrast"`.

_NO_PP = Limit((1,), "the loss compares all samples of the batch, which no stage of a pipeline has in time")
_WITHIN = (1, 5, 10)
#: Cosines that differ by less count as equal, so that a text that occurs twice has the same rank whatever the rounding.
_ALIKE = 1e-6


@dataclass(eq=False)
class ContrastTask(MixedTask):
    """Trains two encoders that map an image or an audio clip and its text to similar vectors (CLIP).

    `data` has records of a text and one image or audio clip each. temperature: divides the cosines. For the other
    options see `CaptionTask`.
    """

    temperature: float = 0.07

    unit = "pairs"
    num_media = 1
    metrics = tuple(
        Metric(f"recall_at_{most}", "", f"share of the images or audio clips whose text is among the nearest {most}")
        for most in _WITHIN
    )
    sum_names = tuple(f"within_{most}" for most in _WITHIN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise DataError(f"temperature={self.temperature}: a temperature is above 0. Use 0.07.")

    def facts(self, world_size: int) -> Facts:
        return Facts(world_size=world_size, global_batch=self.config.train.global_batch, limits={"pp": _NO_PP})

    def collate(self, samples: list[MixedSample]) -> dict[str, Tensor]:
        media = self.processor.collate(samples)
        texts = [[token for token in sample.tokens.tolist() if token >= 0] for sample in samples]
        ids = torch.full((len(texts), max(map(len, texts))), self.codec.pad)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        seen, heard, index = 0, num_pictures(media), list[int]()
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
        """Return the vectors of images or audio clips, and of texts."""
        return tuple(F.normalize(one if one.itemsize == 8 else one.float(), dim=-1) for one in model(**batch))

    @property
    def loss(self) -> GlobalBatchLoss:  # pyright: ignore[reportIncompatibleMethodOverride] - a loss of the whole batch is an object
        return GlobalBatchLoss(self._compare, self._score)

    def _compare(self, own: Any, every: Any, places: Tensor) -> tuple[Tensor, int]:
        """Return the sum of the symmetric InfoNCE losses of some samples, and their number.

        The loss of a sample is the mean of two: its text is compared with all media, and its media with all texts.
        """
        losses = [
            F.cross_entropy(one @ others.T / self.temperature, places, reduction="sum")
            for one, others in zip(own, reversed(every), strict=True)
        ]
        return torch.stack(losses).sum() / 2, len(places)

    def _score(self, own: Any, every: Any, places: Tensor) -> Mapping[str, Tensor]:
        """Count the samples whose text is among the 1, 5 or 10 nearest of all texts."""
        products = own[0] @ every[1].T
        nearer = (products > products.gather(1, places[:, None]) + _ALIKE).sum(1)
        return {f"within_{most}": (nearer < most).sum() for most in _WITHIN}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        count = sums["count"]
        return {f"recall_at_{most}": sums[f"within_{most}"] / count if count else None for most in _WITHIN}


# Edit distance of two texts: the number of letters to change, add or remove.


def edit_distance(one: str, other: str) -> int:
    """Return the minimum number of characters to change, add or remove to turn one text into the other."""
    target = np.frombuffer(other.encode("utf-32-le"), np.uint32)
    places = np.arange(len(target) + 1)
    row = places
    for done, letter in enumerate(one, 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (target != ord(letter)))
        # Insertions: the minimum over all earlier columns, plus one per inserted letter.
        row = np.minimum.accumulate(np.concatenate(([done], best)) - places) + places
    return int(row[-1])
