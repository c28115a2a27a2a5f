"""Encoders of pictures, recordings and texts: transformer blocks over patches, frames or tokens.

Letters: N pictures or recordings, S pixels to a side, M mel bands, F frames, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.speech import SpeechBlock, SpeechStem

#: Tokens of the encoder of sound, of 40 ms each, that become one of the text.
SOUNDS_JOINED = 2


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Width, blocks and heads; the layers inside of a block are 4 times as wide."""

    dim: int
    num_layers: int
    num_heads: int


class Tower(nn.Module):
    """Blocks behind one another, and a norm. Each token looks at all tokens of its own."""

    def __init__(self, shape: TowerShape, dropout: float):
        super().__init__()
        self.blocks = nn.ModuleList(SpeechBlock(shape.dim, shape.num_heads, dropout) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.dim)

    def through(self, x_NTD: Tensor, own_NT: Tensor) -> Tensor:
        """Return states (N, T, D). own_NT: which tokens are no filling, bool."""
        for block in self.blocks:
            x_NTD = block(x_NTD, own_NT)
        return self.norm(x_NTD)


class PictureTower(Tower):
    """Reads pictures as squares of pixels (ViT: Dosovitskiy et al. 2020, arXiv 2010.11929).

    Args:
        shape: width, blocks, heads.
        side: pixels to a side of a picture.
        grid: patches to a side.
        dropout: rate behind each part of a block.
    """

    def __init__(self, shape: TowerShape, side: int, grid: int, dropout: float):
        super().__init__(shape, dropout)
        self.patches = nn.Conv2d(3, shape.dim, side // grid, stride=side // grid)
        self.places = nn.Embedding(grid * grid, shape.dim)

    def forward(self, pixels_N3SS: Tensor) -> Tensor:
        """(N, 3, S, S) to (N, T, D), row by row."""
        x_NTD = self.patches(pixels_N3SS).flatten(2).transpose(1, 2)
        x_NTD = x_NTD + self.places(torch.arange(x_NTD.shape[1], device=x_NTD.device))
        return self.through(x_NTD, torch.ones(x_NTD.shape[:2], dtype=torch.bool, device=x_NTD.device))


class SoundTower(Tower):
    """Reads log-mel bands.

    Args:
        shape: width, blocks, heads.
        mels: bands.
        dropout: rate behind each part of a block.
    """

    def __init__(self, shape: TowerShape, mels: int, dropout: float):
        super().__init__(shape, dropout)
        self.stem = SpeechStem(mels, shape.dim)

    def forward(self, features_NMF: Tensor, frames_N: Tensor) -> Tensor:
        """(N, M, F) to (N, T, D), 0 behind the end of a recording. frames_N: of each."""
        places = torch.arange(encoder_tokens(features_NMF.shape[-1]), device=frames_N.device)
        own_NT = places < encoder_tokens(frames_N)[:, None]
        return self.through(self.stem(features_NMF, frames_N), own_NT) * own_NT[..., None]


class TextTower(Tower):
    """Reads texts both ways.

    Args:
        shape: width, blocks, heads.
        vocab_size: ids.
        most_tokens: of a text.
        dropout: rate behind each part of a block.
    """

    def __init__(self, shape: TowerShape, vocab_size: int, most_tokens: int, dropout: float):
        super().__init__(shape, dropout)
        self.embed = nn.Embedding(vocab_size, shape.dim)
        self.places = nn.Embedding(most_tokens, shape.dim)

    def forward(self, input_ids_NT: Tensor, lengths_N: Tensor) -> Tensor:
        """(N, T) to (N, T, D), 0 behind the end of a text. lengths_N: of each."""
        places = torch.arange(input_ids_NT.shape[1], device=input_ids_NT.device)
        own_NT = places < lengths_N[:, None]
        return self.through(self.embed(input_ids_NT) + self.places(places), own_NT) * own_NT[..., None]


def sound_tokens(frames: Any) -> Any:
    """Return how many tokens of the text a recording of some frames takes."""
    return -(-encoder_tokens(frames) // SOUNDS_JOINED)


def encoder_tokens(frames: Any) -> Any:
    """Return how many tokens the encoder makes of some frames: its two convolutions halve them."""
    return (frames + 3) // 4
