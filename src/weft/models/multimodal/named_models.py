"""Models of pictures, sound and text by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from weft.errors import ModelError, did_you_mean
from weft.models.multimodal.media_decoder import PATCHES_JOINED, MediaDecoder
from weft.models.multimodal.media_pairs import MediaPairs
from weft.models.multimodal.towers import PictureTower, SoundTower, TextTower, TowerShape
from weft.models.transformer import INIT_STD, Decoder
from weft.spec import DecoderSpec

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class MultimodalShape:
    """tower: of each encoder. num_layers, ffn_dim: of the decoder, as wide as they are. hears: whether it has sound."""

    tower: TowerShape
    num_layers: int
    ffn_dim: int
    hears: bool


#: All names that `build_media_decoder` and `build_media_pairs` know.
MULTIMODAL_MODELS = {
    "vlm-tiny": MultimodalShape(TowerShape(128, 4, 4), 4, 352, hears=False),
    "omni-tiny": MultimodalShape(TowerShape(128, 4, 4), 4, 352, hears=True),
}


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a model reads. vocab_size: ids of its text. most_tokens: of a sample. side: pixels to a side of a picture.

    grid: patches to a side. mels: bands of pitch. dropout: rate within the encoders.
    """

    vocab_size: int
    most_tokens: int
    side: int = 32
    grid: int = 8
    mels: int = 40
    dropout: float = 0.0


def build_media_decoder(name: str, inputs: ModelInputs) -> MediaDecoder:
    """Build a model that writes text, with new weights from torch's generator.

    Args:
        name: one of `MULTIMODAL_MODELS`.
        inputs: what it reads.

    Raises:
        ModelError: for a name that is not known, and a side that patches do not divide.
    """
    shape = _shape(name, inputs)
    tower = shape.tower
    spec = DecoderSpec(
        family="llama", vocab_size=inputs.vocab_size, dim=tower.dim, num_layers=shape.num_layers,
        num_heads=tower.num_heads, num_kv_heads=tower.num_heads, ffn_dim=shape.ffn_dim,
        max_seq_len=inputs.most_tokens, tied=False,
    )  # fmt: skip
    return _begun(MediaDecoder(Decoder(spec), *_towers(shape, inputs)))


def build_media_pairs(name: str, inputs: ModelInputs, width: int = 128) -> MediaPairs:
    """Build a model that compares pictures or sound with texts, with new weights from torch's generator.

    Args:
        name: one of `MULTIMODAL_MODELS`.
        inputs: what it reads.
        width: of the vectors.

    Raises:
        ModelError: for a name that is not known, and a side that patches do not divide.
    """
    shape = _shape(name, inputs)
    text = TextTower(shape.tower, inputs.vocab_size, inputs.most_tokens, inputs.dropout)
    return _begun(MediaPairs(text, *_towers(shape, inputs), width))


def hears(name: str) -> bool:
    """Return whether a model of a name reads sound.

    Raises:
        ModelError: for a name that is not known.
    """
    return _named(name).hears


def _named(name: str) -> MultimodalShape:
    if name not in MULTIMODAL_MODELS:
        hint = did_you_mean(name, MULTIMODAL_MODELS) or f" Use one of {', '.join(MULTIMODAL_MODELS)}."
        raise ModelError(f"model={name}: Weft has no model of pictures and text of that name.{hint}")
    return MULTIMODAL_MODELS[name]


def _shape(name: str, inputs: ModelInputs) -> MultimodalShape:
    found = _named(name)
    if inputs.grid % PATCHES_JOINED or inputs.side % inputs.grid:
        raise ModelError(
            f"side={inputs.side}: {inputs.grid} patches to a side must divide it, and their number be a multiple of "
            f"{PATCHES_JOINED}. Use side=32 and grid=8."
        )
    return found


def _towers(shape: MultimodalShape, inputs: ModelInputs) -> tuple[PictureTower, SoundTower | None]:
    vision = PictureTower(shape.tower, inputs.side, inputs.grid, inputs.dropout)
    return vision, SoundTower(shape.tower, inputs.mels, inputs.dropout) if shape.hears else None


def _begun(model: Model) -> Model:
    """Tables as small as the rest of what is added to them."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
    return model
