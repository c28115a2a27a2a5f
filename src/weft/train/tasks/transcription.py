"""Speech recognition with Whisper-like models: `task.name = "transcribe"`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft.config.rules.rule import Facts
from weft.config.shapes.traced_model import Limit
from weft.data.media.audio import AudioTransform
from weft.data.media.audio_features import Features, folder_features
from weft.data.media.files import RecordColumns
from weft.data.media.media_records import MediaRecords, Survey, find_records, record_files
from weft.data.media.records import SOUND
from weft.data.store.prepare import cache_folder
from weft.errors import DataError
from weft.models.inspect import hugging_face
from weft.parallel.pipeline.runtime import pipeline_of
from weft.train.batches.batching_by_cost import TokenCosts
from weft.train.folder import RunFolder
from weft.train.tasks.base import Metric, ModelTask, Report, setting_error
from weft.train.tasks.captioning import LOOK_EVERY, any_goes_on, edit_distance
from weft.train.tasks.decoder_loss import token_cross_entropy
from weft.train.tasks.description import Forwards
from weft.train.tasks.folder_model import HeadedModel
from weft.train.tasks.folder_task import IGNORED, called, folder_limits, padded, padded_length
from weft.train.tasks.media import MediaTask, Progress, SoundProcessor

if TYPE_CHECKING:
    from weft.planner.search.model_source import PlannedModel

#: Reason why sequence parallelism is unsupported.
_NO_SP = Limit(
    (0,), ("evaluations generate token by token, which cannot be sharded; task.options.generate=0 turns it off")
)


@dataclass(eq=False)
class TranscribeTask(MediaTask, ModelTask):
    """Trains a Hugging Face model that transcribes speech: it reads mel bands and generates text.

    Attributes:
        data: records: a file, a folder or a glob of .tar shards, .jsonl or .parquet files, whose columns `audio` and
            `text` are found by the usual names.
        eval: records for evaluation; by default a share `holdout` of `data`.
        language: language of the texts, for tokenizers that mark it, such as "en".
        gain: maximum change of the volume in dB.
        noise: white noise up to this fraction of a clip's level.
        masks: number of masked time spans, and of masked ranges of bands.
        target_len: maximum tokens of a text.
        generate: maximum tokens that evaluations generate per text to compute the character error rate; 0 disables it.
        pad_multiple: padded text lengths are rounded up to a multiple of this.
        audio, text: names of the columns; "" finds the usual names.
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
        self.check_ranges(
            gain=(0.0, 60.0), noise=(0.0, 10.0), masks=(0, 16), target_len=(2, 2**16), generate=(0, 2**16),
            pad_multiple=(1, 4096),
        )  # fmt: skip

    # --- the audio clips and their texts ---

    def prepare(self, folder: RunFolder, report: Report | None) -> None:
        """Check the model and its weights, and find the audio clips.

        Raises:
            CheckpointError: if the weights cannot be read or do not fit the model's config, or the run trains on
                another path.
            ConfigError: if the model does not read mel bands, or does not support `target_len` tokens.
            DataError: if the data is invalid, or has changed since the run was started.
        """
        check_speech_model(self.network, self.target_len)
        super().prepare(folder, report)
        self.network.check_weights(folder)

    def keep(self, folder: RunFolder, notes: Sequence[str]) -> Mapping[str, str]:
        self.network.keep(folder)
        return super().keep(folder, notes)

    def open(self, folder: RunFolder) -> None:
        self.network.open(folder)
        super().open(folder)

    @cached_property
    def processor(self) -> SpokenTexts:
        config, (features, seconds) = self.config, folder_sound(self.network)
        options = {key: value for key, value in config.task.options.items() if key not in _FREE_OPTIONS}
        hearing = AudioTransform(features.rate, seconds, False, self.gain, self.noise, self.masks)
        columns = RecordColumns(self.audio, self.text, SOUND, is_text=True)
        key = [config.task.name, options, config.train.seq_len, self.network.tokenizer_digest()]
        words = SpokenWords(self.network, self.language)
        return SpokenTexts(
            hearing, features, columns, config.data, config.seed, words, self.target_len, self.pad_multiple, tuple(key)
        )

    def facts(self, world_size: int) -> Facts:
        return Facts(
            world_size=world_size, global_batch=self.config.train.global_batch, seq_len=self.target_len,
            limits=self.limits(),
        )  # fmt: skip

    def limits(self) -> dict[str, Limit]:
        """Return limits of plan fields for this task, in addition to its model's limits."""
        return {**folder_limits(self.config), **({"sp": _NO_SP} if self.generate else {})}

    def nominal_count(self) -> int:
        return self.config.train.global_batch * self.target_len

    # --- cost of samples ---

    def lengths(self) -> np.ndarray:
        """Return the padded length of each text, int64 (samples,)."""
        counts, multiple = self.media("train").token_counts(), self.pad_multiple
        return np.maximum(counts, np.minimum(-(-counts // multiple) * multiple, self.target_len))

    def length_costs(self, lengths: np.ndarray) -> np.ndarray:
        costs, _ = self._costs
        return costs.work(lengths) / costs.work(1)

    def extra_costs(self) -> np.ndarray:
        """Return the encoder's cost for each sample, in text tokens: float64 (samples,).

        It is constant, because audio clips are padded to full length.
        """
        costs, encoder = self._costs
        return np.full(len(self.media("train")), encoder / float(costs.work(1)))

    @cached_property
    def _costs(self) -> tuple[TokenCosts, float]:
        return speech_costs(self.shapes())

    # --- the model ---

    @cached_property
    def network(self) -> HeadedModel:
        """The folder's model."""
        return HeadedModel(self.config, ("SpeechSeq2Seq", "speech recognition model"))

    def describe(self) -> PlannedModel:
        found = self.network.describe(self.target_len, self.limits())
        return replace(found, config=self.config, sample_unit=self.sample_unit)

    def begin(self, forwards: Forwards) -> None:
        self._forwards = forwards

    def forward(self, model: Any, batch: Any) -> Any:
        """Return logits, or in evaluation mode with `generate` (logits, generated tokens).

        Under pipeline parallelism, nothing is generated.
        """
        logits = called(model, batch, use_cache=False).logits
        if model.training or not self.generate or pipeline_of(model) is not None:
            return logits
        return logits, written(model, batch["input_features"], self.processor.words, self.generate, self._forwards)

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return token_cross_entropy(output[0] if isinstance(output, tuple) else output, batch)

    def sums(self, output: Any, batch: Any) -> Mapping[str, Tensor | float]:
        logits, written = output if isinstance(output, tuple) else (output, None)
        labels, edits, letters = batch["labels"], 0, 0
        for row, said in enumerate(() if written is None else written.tolist()):
            wrong, length = self.processor.words.edits(said, labels[row])
            edits, letters = edits + wrong, letters + length
        return {"right": (logits.argmax(-1) == labels).sum(), "edits": float(edits), "letters": float(letters)}

    def measure(self, sums: Mapping[str, float]) -> Mapping[str, float | None]:
        share = sums["right"] / sums["count"] if sums["count"] else None
        rate = sums["edits"] / sums["letters"] if sums["letters"] else None
        return {"token_accuracy": share, "character_error_rate": rate}


#: Options that do not affect the tokens of texts.
_FREE_OPTIONS = ("data", "eval", "holdout", "gain", "noise", "masks", "generate", "pad_multiple", "audio", "text")


@dataclass(frozen=True)
class SpokenTexts(SoundProcessor):
    """Processor of audio clips with texts.

    Attributes:
        columns: names of the columns in records.
        words: tokenizer of texts.
        most: maximum tokens of a text.
        multiple: padded lengths are rounded up to a multiple of this.
        key: JSON values on which the tokens depend.
    """

    words: SpokenWords
    most: int
    multiple: int
    key: tuple[Any, ...]

    def find(self, option: str, path: str, progress: Progress) -> MediaRecords:
        """Find the audio clips at a path, and tokenize their texts.

        Raises DataError if there is no file of records, or the data is invalid.
        """
        files = record_files(path, SOUND)
        if not files:
            raise DataError(
                f"{option}={path}: it names no .tar, .jsonl or .parquet file, which a text for each audio clip would "
                "stand in. Give such a file."
            )
        seconds = self.hearing.seconds

        def refuse(size: tuple[int, ...]) -> str:
            lasts = size[0] / size[1]
            return "" if lasts <= seconds else f"it lasts {lasts:.1f} s, and the model hears {seconds:g} s. Split it."

        def tokens(text: str) -> Sequence[int] | str:
            found, most = self.words.tokens(text), self.most
            return found if len(found) <= most else f"its text has {len(found)} tokens, more than target_len={most}"

        survey = Survey((list(self.key), self.features.to_json(), seconds), refuse, tokens)
        return find_records(path, files, self.columns, cache_folder(self.data), progress, survey)

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        texts = [np.asarray(tokens) for _, tokens in samples]
        length = padded_length(max(map(len, texts)), self.multiple, self.most)
        read = [np.concatenate(([self.words.start], one[:-1])) for one in texts]
        return {
            "input_features": torch.from_numpy(np.stack([bands for bands, _ in samples])),
            "decoder_input_ids": padded(read, self.words.pad, length),
            "labels": padded(texts, IGNORED, length),
        }

    def described(self, source: MediaRecords, index: int) -> str:
        return f"{source.file(index)}, text {source.text(index)!r}"

    def text(self, source: MediaRecords, index: int) -> list[tuple[str, float]]:
        parts = ([self.words.start], 0.0), (source.tokens(index).tolist(), 1.0)
        return [(self.words.decode_all(ids), weight) for ids, weight in parts]


class SpokenWords:
    """Tokenizer for the decoder's texts: prefix, text, end token.

    network: the folder's model. language: language of the texts, for tokenizers that mark it, or "".

    Raises:
        ConfigError, DataError: for a folder without a start token or an end token.
    """

    def __init__(self, network: HeadedModel, language: str):
        options = {"language": language, "task": "transcribe"} if language else {}
        config, self._tokenizer = network.read_config(), network.tokenizer(**options)
        starts = [getattr(config, name, None) for name in ("decoder_start_token_id", "bos_token_id")]
        start = next((one for one in starts if one is not None), None)
        if start is None:
            rule = "its config has no decoder_start_token_id. Add it to config.json."
            raise setting_error("model.path", network.config.model.path, rule)
        self.start = int(start)
        empty = list(self._tokenizer("").input_ids)
        ends = [one for one in (self._tokenizer.eos_token_id, *empty[-1:]) if one is not None]
        if not ends:
            raise DataError("model.path: its tokenizer has no eos_token, which ends a text. Add it to its files.")
        self.end = int(ends[0])
        self.pad = self.end if self._tokenizer.pad_token_id is None else int(self._tokenizer.pad_token_id)
        #: Tokens before every text, after the decoder start token.
        self.prefix = self._inner(empty)

    def _inner(self, ids: list[int]) -> list[int]:
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

    def edits(self, written: list[int], labels: Tensor) -> tuple[int, int]:
        """Return the edit distance from generated tokens to the labeled text, and the length of that text."""
        true = self.text(labels[labels != IGNORED].tolist())
        return edit_distance(self.text(written), true), len(true)


def folder_sound(network: HeadedModel) -> tuple[Features, float]:
    """Return the features that the folder's model reads, and the maximum seconds of audio (default 30).

    Raises:
        ConfigError: if model.path is not set.
        DataError: if the folder has no feature extractor.
    """
    if not network.config.model.path:
        raise setting_error("model.path", "", "this task trains a model of a folder. Use the folder of a Whisper.")
    features, seconds = folder_features(network.base)
    return features, 30.0 if seconds is None else float(seconds)


def check_speech_model(network: HeadedModel, target_len: int) -> None:
    """Check that a model can generate `target_len` tokens of text from the features of its folder.

    Raises:
        ConfigError: if it cannot.
        DataError: if the folder has no feature extractor.
    """
    (features, seconds), path, shapes = folder_sound(network), network.config.model.path, network.shapes()
    wanted = hugging_face.input_shapes(shapes, 1).get("input_features")
    if wanted is None or not getattr(shapes.config, "is_encoder_decoder", False):
        rule = f"a {type(shapes).__name__} does not write text of input_features. Give the folder of a Whisper."
        raise setting_error("model.path", path, rule)
    found = features.shape(round(seconds * features.rate))
    if features.name != "input_features" or tuple(wanted) != tuple(found):
        given, read = (" x ".join(map(str, shape)) for shape in (found, wanted))
        rule = f"its feature extractor gives {given} numbers, and its model reads {read}. Use files of one model."
        raise setting_error("model.path", path, rule)
    most = getattr(shapes.config, "max_target_positions", None)
    if most is not None and target_len > most:
        rule = f"the model writes at most {most} tokens. Use {most} or less."
        raise setting_error("task.options.target_len", target_len, rule)


def speech_costs(model: Any) -> tuple[TokenCosts, float]:
    """Return the costs of text tokens, and the encoder's cost per audio clip, which is padded to full length."""
    config, encoder = model.config, model.get_encoder()
    heard = int(config.max_source_positions)
    text = TokenCosts.of(model, config.decoder_layers, config.d_model)
    sound = TokenCosts.of(encoder, config.encoder_layers, config.d_model)
    # Each text token also attends to all encoder frames.
    weights = text.weights - sound.weights + text.per_pair * heard
    return TokenCosts(weights, text.per_pair), float(sound.work(heard))


@torch.no_grad()
def written(model: Any, features_BMT: Tensor, words: SpokenWords, most: int, forwards: Forwards | None) -> Tensor:
    """Return greedily generated tokens for features, (B, at most `most`).

    All ranks call the model the same number of times. If the weights are sharded, each call is a collective.
    """
    rows, cache = len(features_BMT), hugging_face.cache_name(model)
    given = torch.tensor([words.start, *words.prefix], device=features_BMT.device).expand(rows, -1)
    has_ended = torch.zeros(rows, dtype=torch.bool, device=given.device)
    found: list[Tensor] = []
    options: dict[str, Any] = {"input_features": features_BMT}
    for place in range(most):
        output = model(**options, decoder_input_ids=given, use_cache=True)
        said = output.logits[:, -1].argmax(-1).masked_fill(has_ended, words.end)
        found.append(said)
        has_ended = has_ended | (said == words.end)
        if place % LOOK_EVERY == LOOK_EVERY - 1 and not any_goes_on(forwards, has_ended):
            break
        given = said[:, None]
        options = {"encoder_outputs": (output.encoder_last_hidden_state,), cache: getattr(output, cache)}
    return torch.stack(found, 1)
