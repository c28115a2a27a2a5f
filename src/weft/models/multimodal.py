"""Encoders of images, audio and text: transformer blocks over patches, frames or tokens.

Letters: N images or audio clips, S pixels per side, M mel bands, F frames, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.errors import ModelError, did_you_mean
from weft.models.decoder import INIT_STD, Decoder
from weft.models.speech import SpeechBlock, SpeechStem

#: Number of audio encoder tokens, of 40 ms each, that are merged into one text token.
SOUNDS_JOINED = 2


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Width, blocks and heads. The feed-forward layers are 4 times as wide."""

    dim: int
    num_layers: int
    num_heads: int


class Tower(nn.Module):
    """Transformer blocks and a final norm. Each token attends to all tokens of its sample."""

    def __init__(self, shape: TowerShape, dropout: float):
        super().__init__()
        self.blocks = nn.ModuleList(SpeechBlock(shape.dim, shape.num_heads, dropout) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.dim)

    def through(self, x_NTD: Tensor, own_NT: Tensor) -> Tensor:
        """Return states (N, T, D). own_NT: bool, False for padding."""
        for block in self.blocks:
            x_NTD = block(x_NTD, own_NT)
        return self.norm(x_NTD)


class PictureTower(Tower):
    """Image encoder over patches (ViT: Dosovitskiy et al. 2020, arXiv 2010.11929).

    Args:
        shape: width, blocks, heads.
        side: pixels per side of an image.
        grid: patches per side.
        dropout: dropout rate after each part of a block.
    """

    def __init__(self, shape: TowerShape, side: int, grid: int, dropout: float):
        super().__init__(shape, dropout)
        self.patches = nn.Conv2d(3, shape.dim, side // grid, stride=side // grid)
        self.places = nn.Embedding(grid * grid, shape.dim)

    def forward(self, pixels_N3SS: Tensor) -> Tensor:
        """Encode images (N, 3, S, S) as states of patches (N, T, D), which are ordered row by row."""
        x_NTD = self.patches(pixels_N3SS).flatten(2).transpose(1, 2)
        x_NTD = x_NTD + self.places(torch.arange(x_NTD.shape[1], device=x_NTD.device))
        return self.through(x_NTD, torch.ones(x_NTD.shape[:2], dtype=torch.bool, device=x_NTD.device))


class SoundTower(Tower):
    """Audio encoder over log-mel bands.

    Args:
        shape: width, blocks, heads.
        mels: number of bands.
        dropout: dropout rate after each part of a block.
    """

    def __init__(self, shape: TowerShape, mels: int, dropout: float):
        super().__init__(shape, dropout)
        self.stem = SpeechStem(mels, shape.dim)

    def forward(self, features_NMF: Tensor, frames_N: Tensor) -> Tensor:
        """Encode (N, M, F) as (N, T, D), with 0 after the end of an audio clip. frames_N: frames of each audio clip."""
        places = torch.arange(encoder_tokens(features_NMF.shape[-1]), device=frames_N.device)
        own_NT = places < encoder_tokens(frames_N)[:, None]
        return self.through(self.stem(features_NMF, frames_N), own_NT) * own_NT[..., None]


class TextTower(Tower):
    """Text encoder with bidirectional attention.

    Args:
        shape: width, blocks, heads.
        vocab_size: size of the vocabulary.
        most_tokens: maximum number of tokens of a text.
        dropout: dropout rate after each part of a block.
    """

    def __init__(self, shape: TowerShape, vocab_size: int, most_tokens: int, dropout: float):
        super().__init__(shape, dropout)
        self.embed = nn.Embedding(vocab_size, shape.dim)
        self.places = nn.Embedding(most_tokens, shape.dim)

    def forward(self, input_ids_NT: Tensor, lengths_N: Tensor) -> Tensor:
        """Encode (N, T) as (N, T, D), with 0 after the end of a text. lengths_N: tokens of each text."""
        places = torch.arange(input_ids_NT.shape[1], device=input_ids_NT.device)
        own_NT = places < lengths_N[:, None]
        return self.through(self.embed(input_ids_NT) + self.places(places), own_NT) * own_NT[..., None]


def sound_tokens(frames: Any) -> Any:
    """Return the number of text tokens that an audio clip of `frames` frames becomes."""
    return -(-encoder_tokens(frames) // SOUNDS_JOINED)


def encoder_tokens(frames: Any) -> Any:
    """Return the number of encoder tokens for `frames` frames. Each of the two convolutions halves it, rounded up."""
    return (frames + 3) // 4


# A decoder that reads images and audio among its tokens, as LLaVA does (arXiv 2304.08485).

#: Patches per side of the square that is merged into one text token.
PATCHES_JOINED = 2


class MediaDecoder(nn.Module):
    """Decoder that generates text from images, audio and text.

    Args:
        text: the decoder.
        vision: image encoder.
        sound: audio encoder, or None if the model has no audio input.
    """

    def __init__(self, text: Decoder, vision: PictureTower, sound: SoundTower | None):
        super().__init__()
        dim = text.spec.dim
        self.vision, self.sound, self.text = vision, sound, text
        self.join_vision = nn.Linear(PATCHES_JOINED**2 * vision.norm.normalized_shape[0], dim)
        self.join_sound = None if sound is None else nn.Linear(SOUNDS_JOINED * sound.norm.normalized_shape[0], dim)

    def forward(
        self,
        input_ids: Tensor,
        media_index: Tensor,
        pixels: Tensor | None = None,
        features: Tensor | None = None,
        frames: Tensor | None = None,
        vision_states: Tensor | None = None,
        sound_states: Tensor | None = None,
    ) -> Tensor:
        """Return the logits (B, T, V) of the token after each token.

        Args:
            input_ids: (B, T).
            media_index: (B, T), index of the feature row that replaces each token, counted over the rows of all images
                and then of all audio clips; -1 keeps the token.
            pixels: (N, 3, S, S), or None if `vision_states` is passed.
            features: features of audio clips, (A, M, F).
            frames: frames of each audio clip, (A).
            vision_states: output of the image encoder, (N, patches, width).
            sound_states: output of the audio encoder, (A, frames / 4, width).
        """
        rows = [_squares(self.vision(pixels) if vision_states is None else vision_states, self.join_vision)]
        if self.sound is not None:
            states = self.sound(features, frames) if sound_states is None else sound_states
            rows.append(_neighbours(states, self.join_sound))
        return self.text(input_ids, features_ND=torch.cat(rows), feature_index_BT=media_index)

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer, under the method name that transformers uses."""
        return self.text.head


def _squares(states_NTD: Tensor, join: nn.Linear) -> Tensor:
    grid = round(states_NTD.shape[1] ** 0.5)
    x = states_NTD.unflatten(1, (grid // PATCHES_JOINED, PATCHES_JOINED, grid // PATCHES_JOINED, PATCHES_JOINED))
    return join(x.transpose(2, 3).flatten(3).flatten(1, 2).flatten(2)).flatten(0, 1)


def _neighbours(states_ATD: Tensor, join: nn.Linear | None) -> Tensor:
    """Return one row for each group of consecutive audio tokens, (A * Q, D)."""
    assert join is not None
    odd = -states_ATD.shape[1] % SOUNDS_JOINED
    filled = nn.functional.pad(states_ATD, (0, 0, 0, odd))
    return join(filled.unflatten(1, (-1, SOUNDS_JOINED)).flatten(2)).flatten(0, 1)


# A pair of encoders, trained to give similar vectors for an image or audio clip and its text.


class MediaPairs(nn.Module):
    """Dual encoder that returns a vector of an image or an audio clip, and one of a text.

    Args:
        text: text encoder.
        vision: image encoder.
        sound: audio encoder, or None if the model has no audio input.
        width: width of the vectors.
    """

    def __init__(self, text: TextTower, vision: PictureTower, sound: SoundTower | None, width: int):
        super().__init__()
        self.vision, self.sound, self.text = vision, sound, text
        towers = {"vision": vision, "sound": sound, "text": text}
        self.to_vectors = nn.ModuleDict(
            {
                name: nn.Linear(tower.norm.normalized_shape[0], width, bias=False)
                for name, tower in towers.items()
                if tower is not None
            }
        )

    def forward(
        self,
        input_ids: Tensor,
        lengths: Tensor,
        media_index: Tensor,
        pixels: Tensor | None = None,
        features: Tensor | None = None,
        frames: Tensor | None = None,
        vision_states: Tensor | None = None,
        sound_states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return vectors of images or audio clips, and of texts, (B, W) each.

        Args:
            input_ids: texts, (B, T).
            lengths: tokens of each text, (B).
            media_index: index of each sample's image or audio clip, counted over all images and then all audio clips,
                (B).
            pixels: (N, 3, S, S), or None if `vision_states` is passed.
            features: features of audio clips, (A, M, F).
            frames: frames of each audio clip, (A). If None, audio clips are ignored.
            vision_states: output of the image encoder, (N, patches, width).
            sound_states: output of the audio encoder, (A, frames / 4, width).
        """
        seen = self.vision(pixels) if vision_states is None else vision_states
        found = [self.to_vectors["vision"](seen.mean(1))]
        if self.sound is not None and frames is not None:
            states = self.sound(features, frames) if sound_states is None else sound_states
            found.append(self.to_vectors["sound"](states.sum(1) / encoder_tokens(frames)[:, None]))
        texts = self.text(input_ids, lengths).sum(1) / lengths[:, None]
        return torch.cat(found)[media_index], self.to_vectors["text"](texts)


# Models of images, audio and text by name.

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class MultimodalShape:
    """Shape of a multimodal model.

    Attributes:
        tower: shape of each encoder.
        num_layers, ffn_dim: shape of the decoder, which has the encoders' width.
        hears: True if the model has an audio input.
    """

    tower: TowerShape
    num_layers: int
    ffn_dim: int
    hears: bool


#: All model names of `build_media_decoder` and `build_media_pairs`.
MULTIMODAL_MODELS = {
    "vlm-tiny": MultimodalShape(TowerShape(128, 4, 4), 4, 352, hears=False),
    "omni-tiny": MultimodalShape(TowerShape(128, 4, 4), 4, 352, hears=True),
}


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Sizes of a model's inputs.

    Attributes:
        vocab_size: size of the text vocabulary.
        most_tokens: maximum number of tokens of a sample.
        side: pixels per side of an image.
        grid: patches per side of an image.
        mels: number of mel bands.
        dropout: dropout rate within the encoders.
    """

    vocab_size: int
    most_tokens: int
    side: int = 32
    grid: int = 8
    mels: int = 40
    dropout: float = 0.0


def build_media_decoder(name: str, inputs: ModelInputs) -> MediaDecoder:
    """Build a model that generates text, with random weights, drawn from torch's global generator.

    name: one of `MULTIMODAL_MODELS`. inputs: sizes of its inputs.

    Raises:
        ModelError: if the name is unknown, or `inputs.grid` is odd or does not divide `inputs.side`.
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
    """Build a dual encoder for images or audio and text, with random weights, drawn from torch's global generator.

    Args:
        name: one of `MULTIMODAL_MODELS`.
        inputs: sizes of its inputs.
        width: width of the vectors.

    Raises:
        ModelError: if the name is unknown, or `inputs.grid` is odd or does not divide `inputs.side`.
    """
    shape = _shape(name, inputs)
    text = TextTower(shape.tower, inputs.vocab_size, inputs.most_tokens, inputs.dropout)
    return _begun(MediaPairs(text, *_towers(shape, inputs), width))


def hears(name: str) -> bool:
    """Return True if the named model has an audio input.

    Raises:
        ModelError: if the name is unknown.
    """
    return _named(name).hears


def _named(name: str) -> MultimodalShape:
    if name not in MULTIMODAL_MODELS:
        hint = did_you_mean(name, MULTIMODAL_MODELS) or f" Use one of {', '.join(MULTIMODAL_MODELS)}."
        raise ModelError(f"model={name}: Weft has no model of images and text of that name.{hint}")
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
    """Fill the embeddings with normal values of standard deviation `INIT_STD`. Return the same model."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
    return model
