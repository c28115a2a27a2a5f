"""Speech recognition with Whisper-like models: `task.name = "transcribe"`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.config.rules.rule import Facts
from weft.config.traced_model import Limit
from weft.data.media.audio import AudioTransform
from weft.data.media.audio_features import folder_features
from weft.data.media.audio_source import Sounds
from weft.data.media.files import RecordColumns
from weft.data.media.media_records import MediaRecords, Survey, find_records, record_files
from weft.data.media.records import SOUND
from weft.data.store.prepare import cache_folder
from weft.errors import ConfigError, DataError, Problem
from weft.monitor.plots import GridSample
from weft.parallel.pipeline.runtime import pipeline_of
from weft.train.batching_by_cost import TokenCosts
from weft.train.folder import RunFolder
from weft.train.tasks.base import Metric, Report
from weft.train.tasks.captioning import LOOK_EVERY, any_goes_on, edit_distance
from weft.train.tasks.decoder_loss import token_cross_entropy
from weft.train.tasks.description import Forwards
from weft.train.tasks.folder_task import IGNORED, FolderTask, padded, padded_length
from weft.train.tasks.media import MediaTask
from weft.train.weights.decoder_files import base_of

#: Reason that no plan divides the tokens of a text between layers.
_NO_SP = Limit(
    (0,), ("evaluations generate token by token, which cannot be sharded; task.options.generate=0 turns it off")
)


@dataclass(eq=False)
class TranscribeTask(MediaTask, FolderTask):
    """Trains a Hugging Face model that reads mel bands and writes text.

    data: records: a file, a folder or a glob of .tar shards, .jsonl or .parquet files, whose columns `audio` and `text`
    are found by the usual names. eval: other records; by default a share `holdout` of them. language: language of the
    texts, for tokenizers that mark it, such as "en". gain: maximum change of the volume in dB. noise: white noise up to
    this share of a recording's level. masks: number of masked time spans, and of masked ranges of bands. target_len:
    maximum tokens of a text. generate: tokens that evaluations generate for each text to compute the character error
    rate; 0 disables it. pad_multiple: the tokens of a batch are rounded up to a multiple of it.
    """

    data: str
    eval: str = ""
    holdout: float = 0.1
    language: str = ""
    gain: float = 0.0
    noise: float = 0.0
    masks: int = 0
    target_len: int = 128
    generate: int = 64
    pad_multiple: int = 8
    audio: str = ""
    text: str = ""

    unit, sample_unit = "tokens", "recordings"
    head, head_words = "SpeechSeq2Seq", "speech recognition model"
    media_file = "recordings.json"
    sections = ("model.path", "data.cache_dir", "data.workers", "data.batching", "data.microbatch_cost")
    identity = ("model",)
    sum_names = ("right", "edits", "letters")
    metrics = (
        Metric("token_accuracy", "", "teacher-forced token accuracy"),
        Metric("character_error_rate", "", "edits per letter of the spoken text"),
    )

    _forwards: Forwards | None = field(default=None, init=False, repr=False)

    fills_seq_len = False

    def __post_init__(self) -> None:
        self.check_share()
        for name, least, most in (
            ("gain", 0.0, 60.0), ("noise", 0.0, 10.0), ("masks", 0, 16), ("target_len", 2, 2**16),
            ("generate", 0, 2**16), ("pad_multiple", 1, 4096),
        ):  # fmt: skip
            if not least <= getattr(self, name) <= most:
                raise DataError(f"{name}={getattr(self, name)}: it is {least:g} to {most:g}. Use a number between.")

    # --- the recordings and their texts ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the model and its weights, and find the recordings.

        Raises:
            CheckpointError: for weights that do not fit the config, or cannot be read.
            ConfigError: for a model that does not read mel bands, or supports fewer tokens.
            DataError: for invalid data, and for other data than the run was started with.
        """
        self._check_model()
        super().prepare(folder, report)
        if self._needs_folder or not base_of(folder).is_dir():
            self._notes = self._weight_notes()

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        self.keep_base(folder)
        return super().keep(folder, notes)

    def open(self, folder: RunFolder) -> None:
        self._folder = folder
        super().open(folder)

    def _check_model(self) -> None:
        from weft.models.inspect import hugging_face

        path = self.config.model.path
        if not path:
            raise _wrong("model.path", "", "this task trains a model of a folder. Use the folder of a Whisper")
        features, _ = self._extractor_and_window
        shapes: Any = self.shapes()
        wanted = hugging_face.input_shapes(shapes, 1).get("input_features")
        if wanted is None or not getattr(shapes.config, "is_encoder_decoder", False):
            raise _wrong("model.path", path, f"a {type(shapes).__name__} does not write text of input_features. Give "
                         "the folder of a Whisper")  # fmt: skip
        found = features.shape(round(self._extractor_and_window[1] * features.rate))
        if features.name != "input_features" or tuple(wanted) != tuple(found):
            raise _wrong("model.path", path, f"its feature extractor gives {_times(found)} numbers, and its model "
                                             f"reads {_times(wanted)}. Use files of one model")  # fmt: skip
        most = getattr(shapes.config, "max_target_positions", None)
        if most is not None and self.target_len > most:
            raise _wrong("task.options.target_len", self.target_len, f"the model writes at most {most} tokens. Use "
                         f"{most} or less")  # fmt: skip

    @cached_property
    def _extractor_and_window(self) -> tuple[Any, float]:
        """The feature extractor, and the seconds of audio that the model reads."""
        features, seconds = folder_features(self._base)
        return features, 30.0 if seconds is None else float(seconds)

    @cached_property
    def _words(self) -> _Words:
        options = {"language": self.language, "task": "transcribe"} if self.language else {}
        return _Words(self.tokenizer(**options), self._start_id())

    def _start_id(self) -> int:
        from weft.models.inspect import hugging_face

        config: Any = hugging_face.load_model_config(self._base)
        found = [getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id")]
        start = next((one for one in found if one is not None), None)
        if start is None:
            raise _wrong("model.path", self.config.model.path, "its config has no decoder_start_token_id. Add it to "
                         "config.json")  # fmt: skip
        return int(start)

    def source(self, option: str, path: str, told: Callable[[int, int], None] | None) -> MediaRecords:
        """Find the recordings of a path and the tokens of their texts.

        Args:
            option: name of the option with the path.
            path: path as the user typed it.
            told: progress callback, called with (done, total).

        Raises:
            DataError: for invalid data.
        """
        files = record_files(path, SOUND)
        if not files:
            raise DataError(
                f"{option}={path}: it names no .tar, .jsonl or .parquet file, which a text for each recording would "
                "stand in. Give such a file."
            )
        features, seconds = self._extractor_and_window

        def refuse(size: tuple[int, ...]) -> str:
            lasts = size[0] / size[1]
            return "" if lasts <= seconds else (f"it lasts {lasts:.1f} s, and the model hears {seconds:g} s. Split it.")

        def tokens(text: str) -> Sequence[int] | str:
            found = self._words.tokens(text)
            most = self.target_len
            return found if len(found) <= most else f"its text has {len(found)} tokens, more than target_len={most}"

        key = (self._row_key(), features.to_json(), seconds)
        columns = RecordColumns(self.audio, self.text, SOUND, is_text=True)
        survey = Survey(key, refuse, tokens)
        return find_records(path, files, columns, cache_folder(self.config.data), told, survey)

    free_options = ("data", "eval", "holdout", "gain", "noise", "masks", "generate", "pad_multiple", "audio", "text")

    def made(self, source: MediaRecords, split: str) -> Sounds:
        features, seconds = self._extractor_and_window
        hearing = AudioTransform(features.rate, seconds)
        if split == "train":
            hearing = AudioTransform(features.rate, seconds, False, self.gain, self.noise, self.masks)
        return Sounds(source, hearing, features, self.config.seed)

    def described(self, index: int, split: str = "train") -> str:
        source = self.media(split)
        return f"{source.file(index)}, text {source.text(index)!r}"

    def grid_entry(self, place: int, split: str) -> GridSample:
        source, (epoch, index) = self.media(split), self.shown(place, split)
        sounds = self.made(source, split)
        wave, bands = sounds.wave(epoch, index), sounds.decoded(epoch, index)
        said = [
            (self._words.decode_all([self._words.start]), 0.0),
            (self._words.decode_all(source.tokens(index).tolist()), 1.0),
        ]
        title = self.grid_title(place, split)
        return GridSample(title, wave=wave, rate=sounds.hearing.rate, bands=bands, text=said)

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        texts = [np.asarray(tokens) for _, tokens in samples]
        length = padded_length(max(map(len, texts)), self.pad_multiple, self.target_len)
        read = [np.concatenate(([self._words.start], one[:-1])) for one in texts]
        return {
            "input_features": torch.from_numpy(np.stack([made for made, _ in samples])),
            "decoder_input_ids": padded(read, self._words.pad, length),
            "labels": padded(texts, IGNORED, length),
        }

    def facts(self, world_size: int) -> Facts:
        return Facts(
            world_size=world_size, global_batch=self.config.train.global_batch, seq_len=self.target_len,
            limits=self.limits(),
        )  # fmt: skip

    def limits(self) -> dict[str, Limit]:
        return {**super().limits(), **({"sp": _NO_SP} if self.generate else {})}

    def text_len(self) -> int:
        return self.target_len

    def nominal_count(self) -> int:
        return self.config.train.global_batch * self.target_len

    # --- cost of samples ---

    def lengths(self) -> np.ndarray:
        """Return the padded length of each text in a batch of one, int64 (samples,)."""
        counts, multiple = self.media("train").token_counts(), self.pad_multiple
        return np.maximum(counts, np.minimum(-(-counts // multiple) * multiple, self.target_len))

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        costs, _ = self._costs
        return costs.work(lengths) / costs.work(1)

    def extra_costs(self) -> np.ndarray:
        """Return the encoder's cost for each sample. It is constant: recordings are padded to full length."""
        costs, encoder = self._costs
        return np.full(len(self.media("train")), encoder / float(costs.work(1)))

    @cached_property
    def _costs(self) -> tuple[TokenCosts, float]:
        """Costs of text tokens, and the cost of the encoder."""
        model: Any = self.shapes()
        config, encoder = model.config, model.get_encoder()
        heard = int(config.max_source_positions)
        text = TokenCosts.of(model, config.decoder_layers, config.d_model)
        sound = TokenCosts.of(encoder, config.encoder_layers, config.d_model)
        # Each text token also attends to all encoder frames.
        weights = text.weights - sound.weights + text.per_pair * heard
        return TokenCosts(weights, text.per_pair), float(sound.work(heard))

    # --- the model ---

    def begin(self, forwards: Forwards) -> None:
        self._forwards = forwards

    def forward(self, model: Any, batch: Any) -> Any:
        """Return logits. In an evaluation with `generate`, also return the tokens that the model generates."""
        logits = self.called(model, batch, use_cache=False).logits
        if model.training or not self.generate or pipeline_of(model) is not None:
            return logits
        return logits, self.written(model, batch["input_features"])

    @torch.no_grad()
    def written(self, model: Any, features_BMT: Tensor) -> Tensor:
        """Return greedily generated tokens for features, (B, at most `generate`).

        All ranks call the model the same number of times. If the weights are sharded, each call is a collective.
        """
        from weft.models.inspect import hugging_face

        words, rows, cache = self._words, len(features_BMT), hugging_face.cache_name(model)
        given = torch.tensor([words.start, *words.prefix], device=features_BMT.device).expand(rows, -1)
        has_ended = torch.zeros(rows, dtype=torch.bool, device=given.device)
        found: list[Tensor] = []
        options: dict[str, Any] = {"input_features": features_BMT}
        for place in range(self.generate):
            output = model(**options, decoder_input_ids=given, use_cache=True)
            said = output.logits[:, -1].argmax(-1).masked_fill(has_ended, words.end)
            found.append(said)
            has_ended = has_ended | (said == words.end)
            if place % LOOK_EVERY == LOOK_EVERY - 1 and not any_goes_on(self._forwards, has_ended):
                break
            given = said[:, None]
            encoded = (output.encoder_last_hidden_state,)
            options = {"encoder_outputs": encoded, cache: getattr(output, cache)}
        return torch.stack(found, 1)

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return token_cross_entropy(output[0] if isinstance(output, tuple) else output, batch)

    def sums(self, output: Any, batch: Any) -> Mapping[str, Tensor | float]:
        logits, written = output if isinstance(output, tuple) else (output, None)
        labels, edits, letters = batch["labels"], 0, 0
        for row, said in enumerate(() if written is None else written.tolist()):
            true = self._words.text(labels[row][labels[row] != IGNORED].tolist())
            edits, letters = edits + edit_distance(self._words.text(said), true), letters + len(true)
        return {"right": (logits.argmax(-1) == labels).sum(), "edits": float(edits), "letters": float(letters)}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        share = sums["right"] / sums["count"] if sums["count"] else None
        rate = sums["edits"] / sums["letters"] if sums["letters"] else None
        return {"token_accuracy": share, "character_error_rate": rate}


class _Words:
    """A tokenizer adapted to the decoder's texts: prefix, text, end."""

    def __init__(self, tokenizer: Any, start: int):
        self._tokenizer, self.start = tokenizer, start
        empty = list(tokenizer("").input_ids)
        ends = [one for one in (tokenizer.eos_token_id, *empty[-1:]) if one is not None]
        if not ends:
            raise DataError("model.path: its tokenizer has no eos_token, which ends a text. Add it to its files.")
        self.end = int(ends[0])
        pads = (tokenizer.pad_token_id, self.end)
        self.pad = int(next(one for one in pads if one is not None))
        #: Tokens before every text, after the decoder start token.
        self.prefix = self._inner(empty)

    def _inner(self, ids: list[int]) -> list[int]:
        """Return tokens without the decoder start token and the end token."""
        ids = ids[1:] if ids and ids[0] == self.start else ids
        return ids[:-1] if ids and ids[-1] == self.end else ids

    def tokens(self, text: str) -> list[int]:
        """Return the target tokens of a text, including the end token."""
        return [*self._inner(list(self._tokenizer(text).input_ids)), self.end]

    def decode_all(self, ids: list[int]) -> str:
        """Return the text of tokens, including special tokens."""
        return self._tokenizer.decode(ids)

    def text(self, ids: list[int]) -> str:
        """Return the text of tokens up to the end token."""
        known = ids[: ids.index(self.end)] if self.end in ids else ids
        return self._tokenizer.decode(known, skip_special_tokens=True).strip()


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _wrong(key: str, value: object, rule: str) -> ConfigError:
    return ConfigError([Problem(key, f"{key}={value}: {rule}.")])
