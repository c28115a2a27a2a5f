"""Processors of Hugging Face folders: model inputs of an image or an audio clip, and the text that replaces it."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data.media.audio import AudioTransform, apply_transform, soxr
from weft.data.media.images import Encoded, pillow, read_upright
from weft.errors import DataError, MissingExtra

#: How inputs of several samples are joined. rows: concatenated along dim 0. samples: one row per sample. Other dims are
#: padded with zeros.
Join = Literal["rows", "samples"]
_FILES = ("processor_config.json", "preprocessor_config.json")
#: Outputs of processors that are no inputs of images or audio clips.
_TEXT = ("input_ids", "attention_mask", "labels", "text_replacement_offsets")
#: Attributes of a processor: the placeholder, and the part for images (False) or audio clips (True).
_PARTS = {False: ("image_token", "image_processor"), True: ("audio_token", "feature_extractor")}
#: Processors that cannot be accepted, with the reason.
_REFUSED = {
    "Idefics2Processor": "it joins the marks of neighboring images and adds spaces to the text after them, so the "
    "tokens of an image depend on the text around it",
    "MllamaProcessor": "its model attends from each token to the images before it in layers of their own, and the mask "
    "of these layers belongs to a full conversation, not to an image",
    "VoxtralProcessor": "only mistral-common renders its conversations",
}
#: Sizes of images (width, height) and audio clips (samples) with which processors are tested.
_TESTED: dict[bool, list[tuple[int, ...]]] = {
    False: [(32, 32), (40, 96), (700, 400)],
    True: [(1600,), (4000,), (2400,)],
}
#: Chat template of processors that take a prompt and a suffix, as their code joins them.
_SUFFIX_TEMPLATE = """
{%- for message in messages -%}
{%- if loop.index0 > 1 or message.role != ('assistant' if loop.index0 else 'user') -%}
{{ raise_exception('the model reads one prompt and one answer') }}
{%- endif -%}
{%- set left = namespace(images=message.content | selectattr('type', 'equalto', 'image') | list | length) -%}
{%- if loop.first and not left.images -%}{{ bos_token }}{%- endif -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{%- set left.images = left.images - 1 -%}{{ IMAGE }}{%- if not left.images -%}{{ bos_token }}{%- endif -%}
{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{{ '\\n' if loop.first else eos_token }}
{%- endfor -%}"""


class MediaInputs(NamedTuple):
    """How a processor handles images, or audio clips.

    Attributes:
        mark: placeholder in rendered chats.
        inputs: names of the model's inputs, with their joins.
        is_single: True if a conversation may have only one, because the processor handles several differently.
    """

    mark: str
    inputs: Mapping[str, Join]
    is_single: bool


class Processed(NamedTuple):
    """Inputs of an image or an audio clip by name, and the text that replaces its placeholder."""

    text: str
    inputs: dict[str, NDArray[Any]]


class FolderProcessor:
    """The processor of a folder, without its video processor, which needs torchvision.

    A processor is accepted if its output for a batch of conversations is joined from its outputs for each image, each
    audio clip and each text. This is tested with generated ones. Images are processed with Pillow, so that tensors do
    not depend on what else is installed.

    Args:
        folder: folder with the processor's files.
        max_pixels: larger images are scaled down to about this many pixels. 0: no limit.

    Raises:
        DataError: for a folder without a readable processor, or whose processor is not accepted.
        MissingExtra: if transformers is not installed.
    """

    def __init__(self, folder: Path, max_pixels: int = 0):
        self.folder, self.max_pixels = folder, max_pixels
        self._processor = _loaded(str(folder), processor_digest(folder))
        self.tokenizer: Any = self._processor.tokenizer
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        extractor = getattr(self._processor, "feature_extractor", None)
        self._rate = int(getattr(extractor, "sampling_rate", 0) or 16_000)
        #: Maximum seconds of an audio clip.
        self.seconds = float(getattr(extractor, "chunk_length", None) or 30.0)
        #: True if the answer is the processor's `suffix`, which is tokenized separately, after a bidirectional prompt.
        self.has_suffix = "suffix" in inspect.signature(type(self._processor).__call__).parameters
        #: Kinds of media: images (False) and audio clips (True).
        self.kinds: dict[bool, MediaInputs] = {}
        #: Inputs that mark the tokens of media: value by token id. With a suffix, it is 1 from the answer on.
        self.types: dict[str, dict[int, int]] = {}
        self._find_kinds()
        self._blanks: dict[tuple[Any, ...], tuple[str, int]] = {}
        self.chat_template: Any = self._processor.chat_template or self.tokenizer.chat_template
        if self.has_suffix and not self.chat_template:
            self.chat_template = _SUFFIX_TEMPLATE.replace("IMAGE", repr(self.kinds[False].mark))

    def read(self, encoded: Encoded, is_sound: bool, size: tuple[int, ...]) -> Processed:
        """Read an image or an audio clip, and return its model inputs and the text that replaces its placeholder.

        Args:
            encoded: the file.
            is_sound: whether it is an audio clip.
            size: its size from its header, as in `MediaRecords.size`.

        Raises:
            DataError: if it cannot be decoded, or the processor rejects it.
        """
        if is_sound:
            return self._process(apply_transform(encoded, size, AudioTransform(self._rate, self.seconds)), is_sound)
        picture = read_upright(encoded)
        scaled = self._scaled(*picture.size)
        if scaled != picture.size:
            picture = picture.resize(scaled, pillow().Resampling.BICUBIC, reducing_gap=3.0)
        return self._process(picture, is_sound)

    def blank(self, is_sound: bool, size: tuple[int, ...]) -> tuple[str, int]:
        """Return the text for an image or an audio clip of a size, and the number of bytes of its packed inputs."""
        if not is_sound:
            size = self._scaled(*size[:2])
        elif size[1] == self._rate:
            size = size[:1]
        else:
            size = (len(soxr().resample(np.zeros(size[0], np.float32), size[1], self._rate, quality="HQ")),)
        if (is_sound, size) not in self._blanks:
            made = self.empty(is_sound, size)
            self._blanks[is_sound, size] = made.text, len(pack(made.inputs))
        return self._blanks[is_sound, size]

    def empty(self, is_sound: bool, size: tuple[int, ...] = ()) -> Processed:
        """Return a black image of (width, height), or a silent audio clip of (samples,), as processed.

        size: () for a small one.
        """
        return self._process(_blank(is_sound, size or _TESTED[is_sound][0]), is_sound)

    def encode(self, text: str, cut: int) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of a conversation, and for each its first character and the one after it.

        cut: first character of the answer.
        """
        begin = self.tokenizer.bos_token
        starts = [0, cut] if self.has_suffix else [0]
        options = {"add_special_tokens": not self.has_suffix and not (begin and text.startswith(begin))}
        ids, places = [], []
        for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
            made = self.tokenizer(text[start:end], return_offsets_mapping=True, **options)
            ids += made["input_ids"]
            places.append(np.array(made["offset_mapping"], np.int64).reshape(-1, 2) + start)
        low, high = np.concatenate(places).T
        return np.array(ids, np.int32), low, high

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        if not self.max_pixels or width * height <= self.max_pixels:
            return width, height
        scale = (self.max_pixels / (width * height)) ** 0.5
        return max(1, round(width * scale)), max(1, round(height * scale))

    def _process(self, media: Any, is_sound: bool) -> Processed:
        kind = self.kinds[is_sound]
        try:
            made, text = self._alone(media, is_sound, kind.mark)
        except Exception as error:  # processors raise almost anything for images that they do not accept
            raise DataError(f"the processor of {self.folder} refuses it ({_first(error)}). Leave it out.") from error
        return Processed(text, {name: _own(made[name], join) for name, join in kind.inputs.items()})

    def _alone(self, media: Any, is_sound: bool, mark: str) -> tuple[dict[str, Any], str]:
        """Return the processor's output for an image or an audio clip, and the text that replaces its placeholder."""
        made = self._call([mark], [[media]], is_sound, return_text_replacement_offsets=True)
        return made, str(made["text_replacement_offsets"][0][0]["replacement"])

    def _call(self, texts: list[str], media: list[list[Any]], is_sound: bool, **options: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"images": media}
        if is_sound:
            given = {"audio": [one for some in media for one in some], "sampling_rate": self._rate}
        options |= {"padding": True, "return_tensors": "np"}
        return dict(self._processor(text=texts, **given, **options))

    # --- the test of the processor ---

    def _find_kinds(self) -> None:
        """Find the kinds of media that the processor handles one by one.

        Raises:
            DataError: if it handles no kind so.
        """
        why = "it reads no images and no audio clips in place of tokens"
        for is_sound, names in _PARTS.items():
            mark, part = (getattr(self._processor, name, None) for name in names)
            if not mark or part is None:
                continue
            rng, sizes = np.random.default_rng(1), _TESTED[is_sound]
            media: list[Any] = [rng.normal(0.0, 0.1, size).astype(np.float32) for size in sizes]
            if not is_sound:
                media = [pillow().radial_gradient("L").resize(size).convert("RGB") for size in sizes]
            try:
                alone = [self._alone(one, is_sound, mark) for one in media]
                if self._alone(_blank(is_sound, sizes[1]), is_sound, mark)[1] != alone[1][1]:
                    raise ValueError("its tokens depend on more than the size of an image or an audio clip")
                try:
                    self.kinds[is_sound] = self._tested([[0], [1, 2]], media, alone, is_sound)
                except Exception:  # it may handle several differently
                    self.kinds[is_sound] = self._tested([[0], [1], [2]], media, alone, is_sound)
            except Exception as error:  # processors raise almost anything
                why = _first(error)
        if not self.kinds:
            name = type(self._processor).__bases__[0].__name__
            raise DataError(
                f"model.path={self.folder}: task=chat cannot use its {name} ({why}). Use the folder of another family; "
                "leave task.name out to train on texts."
            )

    def _tested(
        self, groups: list[list[int]], media: list[Any], alone: list[tuple[dict[str, Any], str]], is_sound: bool
    ) -> MediaInputs:
        """Return how the processor handles media in conversations.

        Args:
            groups: indices of the media of each conversation.
            media: images or audio clips.
            alone: output of `_alone` for each.
            is_sound: whether they are audio clips.

        Raises:
            ValueError: if the output for the conversations is not joined from those for each.
        """
        mark, suffix = getattr(self._processor, _PARTS[is_sound][0]), "ab" if self.has_suffix else ""
        texts = ["".join(f"{mark}And {at}?" for at in some) for some in groups]
        options = {"suffix": [suffix] * len(texts)} if suffix else {}
        made = self._call(texts, [[media[at] for at in some] for some in groups], is_sound, **options)
        marking = [name for name in made if np.shape(made[name]) == made["input_ids"].shape and name not in _TEXT]
        for row, (text, some) in enumerate(zip(texts, groups, strict=True)):
            if suffix:
                before, _, after = text.rpartition(mark)
                text = f"{before}{mark}{self.tokenizer.bos_token}{after}\n"
            pieces = [alone[at][1] + piece for at, piece in zip(some, text.split(mark)[1:], strict=True)]
            prompt = text.split(mark)[0] + "".join(pieces)
            ids, low, _ = self.encode(prompt + (suffix and suffix + self.tokenizer.eos_token), len(prompt))
            shown = made["attention_mask"][row] == 1
            if ids.tolist() != made["input_ids"][row][shown].tolist():
                raise ValueError("the tokens of a conversation are not those of its text with each image or audio clip")
            for name in marking:
                self._learn_types(name, ids, low >= len(prompt), made[name][row][shown])
        inputs = [name for name in made if name not in (*_TEXT, *marking)]
        return MediaInputs(mark, {name: _join_of(name, made[name], groups, alone) for name in inputs}, len(groups) > 2)

    def _learn_types(self, name: str, ids: NDArray[Any], is_answer: NDArray[Any], values: NDArray[Any]) -> None:
        """Add the token ids that an input marks to `types`.

        Raises:
            ValueError: if the values depend on more than the token or the answer.
        """
        pairs = [] if self.has_suffix else zip(ids.tolist(), values.tolist(), strict=True)
        known = self.types.get(name, {}) | {one: value for one, value in pairs if value}
        expected = is_answer.tolist() if self.has_suffix else [known.get(one, 0) for one in ids.tolist()]
        if values.tolist() != expected:
            raise ValueError(f"its {name} depend on more than the tokens")
        if known or self.has_suffix:
            self.types[name] = known


def joined(arrays: Sequence[NDArray[Any]], join: Join) -> NDArray[Any]:
    """Return arrays joined along dim 0, or stacked. Other dims are padded with zeros."""
    is_first, most = join == "rows", np.max([one.shape for one in arrays], axis=0)
    missing = [most - one.shape for one in arrays]
    for one in missing:
        one[:is_first] = 0
    rows = [np.pad(one, [(0, n) for n in more]) for one, more in zip(arrays, missing, strict=True)]
    return np.concatenate(rows) if is_first else np.stack(rows)


def _blank(is_sound: bool, size: tuple[int, ...]) -> Any:
    return np.zeros(size, np.float32) if is_sound else pillow().new("RGB", size)


def _own(values: Any, join: Join) -> NDArray[Any]:
    """Return the input of an image or an audio clip from the processor's output for it alone."""
    return np.asarray(values)[0] if join == "samples" else np.asarray(values)


def _join_of(name: str, made: Any, groups: list[list[int]], alone: list[tuple[dict[str, Any], str]]) -> Join:
    """Return how a processor joins an input of several images or audio clips.

    Raises:
        ValueError: if it is not joined.
    """
    for join in ("rows", "samples"):
        parts = [joined([_own(alone[at][0][name], join) for at in some], "rows") for some in groups]
        if np.array_equal(joined(parts, join), np.asarray(made)):
            return join
    raise ValueError(f"its {name} of several images or audio clips are not joined from those of each")


def _first(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200].rstrip(".")


def _class_name(folder: Path) -> str:
    """Return the name of the class of a folder's processor.

    Raises:
        DataError: if the folder has no processor, or a file cannot be read.
    """
    try:
        family = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
        found = [json.loads((folder / name).read_text("utf-8")) for name in _FILES if (folder / name).is_file()]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"model.path={folder}: its files cannot be read ({why}). Copy the model's again.") from error
    if not found:
        raise DataError(
            f"model.path={folder}: it has no processor. Copy the {' or '.join(_FILES)} of the model into it."
        )
    known: Any = importlib.import_module("transformers.models.auto.processing_auto").PROCESSOR_MAPPING_NAMES
    named = next((fields["processor_class"] for fields in found if fields.get("processor_class")), None)
    return str(named or known.get(family) or "processor")


def processor_digest(folder: Path) -> str:
    """Return a digest of the files of a folder's processor, tokenizer and chat template."""
    hasher = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name.startswith(_NAMES):
            hasher.update(file.name.encode() + file.read_bytes())
    return hasher.hexdigest()


_NAMES = ("processor", "preprocessor", "chat_template", "tokenizer", "vocab", "merges", "special", "added", "spiece")


@lru_cache(maxsize=2)
def _loaded(folder: str, digest: str) -> Any:
    """Return the processor of a folder, which is cached until its files change. It runs no code of the folder."""
    del digest
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("transformers", "hf", "a Hugging Face model") from error
    pillow()
    name = _class_name(Path(folder))
    kind: Any = getattr(transformers, name, None)
    if lacks := " ".join(getattr(kind, "_backends", ())):  # of a class that stands in for one with missing packages
        raise DataError(f"model.path={folder}: its {name} needs {lacks}. Install it: pip install {lacks}.")
    if name in _REFUSED:
        raise DataError(
            f"model.path={folder}: task=chat cannot use its {name}, because {_REFUSED[name]}. Use the folder of "
            "another family; leave task.name out to train on texts."
        )
    if kind is None or not hasattr(kind, "get_text_with_replacements"):
        raise DataError(f"model.path={folder}: its {name} needs a newer transformers. Install transformers>=5.24.")

    class WithoutVideos(kind):
        """The processor without a video processor, which its constructor would refuse."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    if (Path(folder) / "tekken.json").is_file() and not (Path(folder) / "tokenizer.json").is_file():
        rule = "mistral-common alone reads its tekken.json, which task=chat does not use"
        raise DataError(f"model.path={folder}: {rule}. Put the tokenizer.json of the model into it.")
    given: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        loaders = {
            "tokenizer": lambda: transformers.AutoTokenizer.from_pretrained(folder, **given),
            "image_processor": lambda: transformers.AutoImageProcessor.from_pretrained(folder, backend="pil", **given),
            "feature_extractor": lambda: transformers.AutoFeatureExtractor.from_pretrained(folder, **given),
            "video_processor": lambda: None,
        }
        parts = [loaders[part]() for part in kind.get_attributes()]
        fields, _ = kind.get_processor_dict(folder, local_files_only=True)
        return WithoutVideos.from_args_and_dict(parts, fields)
    except Exception as error:  # the exception depends on the files
        first = _first(error)
        if isinstance(error, ImportError):
            raise DataError(f"model.path={folder}: its {name} lacks a package. {first}.") from error
        raise DataError(
            f"model.path={folder}: transformers cannot read its processor ({first}). Copy its files of the model again."
        ) from error


def pack(inputs: Mapping[str, NDArray[Any]]) -> bytes:
    """Return named arrays as bytes."""
    from safetensors.numpy import save

    return save({name: np.ascontiguousarray(values) for name, values in inputs.items()})


def unpack(data: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    """Return the named arrays of `pack`."""
    from safetensors.numpy import load

    return load(data.tobytes())
