"""Processors of Hugging Face folders: model inputs of an image or an audio clip, and the text that replaces it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.data.media.audio import AudioTransform, apply_transform, soxr
from weft.data.media.images import Encoded, pillow, read_upright
from weft.errors import DataError, MissingExtra

#: How inputs of several samples are joined. rows: concatenated along dim 0. samples: one row per sample, padded with
#: zeros, which the model ignores.
Join = Literal["rows", "samples"]


class Family(NamedTuple):
    """A family of models whose processor is supported.

    Attributes:
        processor: name of the processor's class.
        inputs: names of the inputs of an image or an audio clip, with their joins.
        types: name of the input that marks the tokens of images, or "".
        is_audio: True if the model reads audio clips, False if it reads images.
    """

    processor: str
    inputs: Mapping[str, Join]
    types: str = ""
    is_audio: bool = False


_GRID: dict[str, Join] = {"pixel_values": "rows", "image_grid_thw": "rows"}
_PIXELS: dict[str, Join] = {"pixel_values": "rows"}
_TILES: dict[str, Join] = {"pixel_values": "samples", "pixel_attention_mask": "samples"}
_SOUND: dict[str, Join] = {"input_features": "rows", "feature_attention_mask": "rows"}
#: The families whose batches are tested against their processors, by model_type.
FAMILIES = {
    "qwen2_vl": Family("Qwen2VLProcessor", _GRID, "mm_token_type_ids"),
    "qwen2_5_vl": Family("Qwen2_5_VLProcessor", _GRID, "mm_token_type_ids"),
    "qwen3_vl": Family("Qwen3VLProcessor", _GRID, "mm_token_type_ids"),
    "llava": Family("LlavaProcessor", _PIXELS),
    "internvl": Family("InternVLProcessor", _PIXELS),
    "gemma3": Family("Gemma3Processor", _PIXELS, "token_type_ids"),
    "idefics3": Family("Idefics3Processor", _TILES),
    "smolvlm": Family("SmolVLMProcessor", _TILES),
    "qwen2_audio": Family("Qwen2AudioProcessor", _SOUND, is_audio=True),
}
_FILES = ("processor_config.json", "preprocessor_config.json")


class Processed(NamedTuple):
    """Inputs of an image or an audio clip by name, and the text that replaces its placeholder."""

    text: str
    inputs: dict[str, NDArray[Any]]


class FolderProcessor:
    """The processor of a folder, without its video processor, which needs torchvision.

    Images are processed with Pillow, so that tensors do not depend on what else is installed.

    Args:
        folder: folder with the processor's files.
        max_pixels: larger images are scaled down to about this many pixels. 0: no limit.

    Raises:
        DataError: for a folder of another family, or without a readable processor.
        MissingExtra: if transformers is not installed.
    """

    def __init__(self, folder: Path, max_pixels: int = 0):
        self.folder, self.max_pixels, self.family = folder, max_pixels, family_of(folder)
        self._processor = _loaded(str(folder), processor_digest(folder))
        self.tokenizer: Any = self._processor.tokenizer
        extractor = getattr(self._processor, "feature_extractor", None)
        self._rate = int(getattr(extractor, "sampling_rate", 0) or 16_000)
        #: Maximum seconds of an audio clip.
        self.seconds = float(getattr(extractor, "chunk_length", None) or 30.0)
        #: Placeholder in rendered chats.
        self.mark = str(self._processor.audio_token if self.family.is_audio else self._processor.image_token)
        self.chat_template: Any = self._processor.chat_template or self.tokenizer.chat_template
        self._blanks: dict[tuple[Any, ...], tuple[str, int]] = {}

    def read(self, encoded: Encoded, size: tuple[int, ...]) -> Processed:
        """Read an image or an audio clip, and return its model inputs and the text that replaces its placeholder.

        size: its size from its header, as in `MediaRecords.size`.

        Raises:
            DataError: if it cannot be decoded, or the processor rejects it.
        """
        if self.family.is_audio:
            return self._process(apply_transform(encoded, size, AudioTransform(self._rate, self.seconds)))
        picture = read_upright(encoded)
        scaled = self._scaled(*picture.size)
        if scaled != picture.size:
            picture = picture.resize(scaled, pillow().Resampling.BICUBIC, reducing_gap=3.0)
        return self._process(picture)

    def blank(self, size: tuple[int, ...]) -> tuple[str, int]:
        """Return the text for an image or an audio clip of a size, and the number of bytes of its packed inputs."""
        if not self.family.is_audio:
            key: tuple[int, ...] = self._scaled(*size[:2])
        elif size[1] == self._rate:
            key = size[:1]
        else:
            key = (len(soxr().resample(np.zeros(size[0], np.float32), size[1], self._rate, quality="HQ")),)
        if key not in self._blanks:
            made = self.empty(key)
            self._blanks[key] = made.text, len(pack(made.inputs))
        return self._blanks[key]

    def empty(self, size: tuple[int, ...]) -> Processed:
        """Return a black image of (width, height), or a silent audio clip of (samples,), as processed."""
        return self._process(np.zeros(size, np.float32) if self.family.is_audio else pillow().new("RGB", size))

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        if not self.max_pixels or width * height <= self.max_pixels:
            return width, height
        scale = (self.max_pixels / (width * height)) ** 0.5
        return max(1, round(width * scale)), max(1, round(height * scale))

    def _process(self, media: Any) -> Processed:
        given = {"audio": [media], "sampling_rate": self._rate} if self.family.is_audio else {"images": [media]}
        try:
            made = self._processor(text=[self.mark], **given, return_tensors="np", return_text_replacement_offsets=True)
        except Exception as error:  # processors raise almost anything for images that they do not accept
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
            raise DataError(f"the processor of {self.folder} refuses it ({first}). Leave it out.") from error
        # Of inputs with a row per sample, there is one sample.
        inputs = {
            name: np.asarray(made[name])[0] if join == "samples" else np.asarray(made[name])
            for name, join in self.family.inputs.items()
        }
        return Processed(str(made["text_replacement_offsets"][0][0]["replacement"]), inputs)


def family_of(folder: Path) -> Family:
    """Return the family of a folder's model.

    Raises:
        DataError: if the family is not in `FAMILIES`, the folder has no processor or another family's, or a file
            cannot be read.
    """
    try:
        family = json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
        found = [json.loads((folder / name).read_text("utf-8")) for name in _FILES if (folder / name).is_file()]
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"model.path={folder}: its files cannot be read ({why}). Copy the model's again.") from error
    if family not in FAMILIES:
        raise DataError(
            f"model.path={folder}: task=chat supports {', '.join(FAMILIES)}, and this is a "
            f"{family}. Use the folder of one of them; leave task.name out to train on texts."
        )
    if not found:
        raise DataError(
            f"model.path={folder}: it has no processor. Copy the {' or '.join(_FILES)} of the model into it."
        )
    named = next((fields["processor_class"] for fields in found if fields.get("processor_class")), None)
    wanted = FAMILIES[family].processor
    if named not in (None, wanted):
        raise DataError(
            f"model.path={folder}: its processor is a {named}, and a {family} needs a {wanted}. Use its folder."
        )
    return FAMILIES[family]


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
    name = family_of(Path(folder)).processor
    kind: Any = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "get_text_with_replacements"):
        raise DataError(f"model.path={folder}: its {name} needs a newer transformers. Install transformers>=5.24.")

    class WithoutVideos(kind):
        """The processor without a video processor, which its constructor would refuse."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

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
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200].rstrip(".")
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
