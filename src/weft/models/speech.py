"""An encoder of log-mel bands: convolutions over time, then transformer blocks, as in Whisper (arXiv 2212.04356).

Frames after the end of an audio clip are masked everywhere, so the results do not depend on the padding of the batch.
Letters: B batch, M mel bands, S frames, T frames after the convolutions, D width, N heads, H head width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError, did_you_mean

#: Each of the two convolutions halves the number of frames.
_STRIDE = 2
#: Kernel width of the positional convolution, in positions of 40 ms.
_AROUND = 31


@dataclass(frozen=True, slots=True)
class SpeechShape:
    """Width, blocks and heads of an encoder. The feed-forward layers are 4 times as wide."""

    dim: int
    num_layers: int
    num_heads: int


#: All model names of `build_speech_model`.
SPEECH_MODELS = {"speech-tiny": SpeechShape(144, 4, 4)}


class SpeechAttention(nn.Module):
    """Attention over all frames of an audio clip."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.head_dim = dim // num_heads
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, x_BTD: Tensor, heard_BT: Tensor) -> Tensor:
        """Compute attention: (B, T, D) to (B, T, D). heard_BT: True if a frame belongs to its audio clip."""
        q, k, v = (
            layer(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        found_BNTH = F.scaled_dot_product_attention(q, k, v, attn_mask=heard_BT[:, None, None, :])
        return self.out(found_BNTH.transpose(1, 2).flatten(2))


class SpeechBlock(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to its input.

    Args:
        dim: width.
        num_heads: number of attention heads.
        dropout: dropout rate after each part.
    """

    def __init__(self, dim: int, num_heads: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SpeechAttention(dim, num_heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor, heard_BT: Tensor) -> Tensor:
        """Compute the block: (B, T, D) to (B, T, D). heard_BT: True if a frame belongs to its audio clip."""
        x_BTD = x_BTD + self.dropout1(self.attention(self.norm1(x_BTD), heard_BT))
        return x_BTD + self.dropout2(self.down(F.gelu(self.up(self.norm2(x_BTD)))))


class SpeechStem(nn.Module):
    """Two convolutions that each halve the number of frames, and a depthwise positional convolution.

    Positions are relative, so the blocks get the same input for the same audio at any time (wav2vec 2.0, arXiv
    2006.11477).
    """

    def __init__(self, mels: int, dim: int):
        super().__init__()
        self.conv1 = nn.Conv1d(mels, dim, 3, stride=_STRIDE, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=_STRIDE, padding=1)
        self.around = nn.Conv1d(dim, dim, _AROUND, padding=_AROUND // 2, groups=dim)

    def forward(self, features_BMS: Tensor, frames_B: Tensor) -> Tensor:
        """Compute states (B, T, D) from mel bands (B, M, S). frames_B: frames of each audio clip."""
        # Subtract the mean of each band over the audio clip: constant noise or a dull microphone is not part of the
        # speech.
        heard_B1S = _frame_mask(frames_B, features_BMS.shape[-1])[:, None]
        x_BDT = features_BMS - (features_BMS * heard_B1S).sum(-1, keepdim=True) / frames_B[:, None, None]
        for conv in (self.conv1, self.conv2):
            x_BDT = F.gelu(conv(x_BDT * _frame_mask(frames_B, x_BDT.shape[-1])[:, None]))
            frames_B = _halved(frames_B)
        x_BDT = x_BDT * _frame_mask(frames_B, x_BDT.shape[-1])[:, None]
        return (x_BDT + F.gelu(self.around(x_BDT))).transpose(1, 2)


class SpeechEncoder(nn.Module):
    """Classifier of audio clips.

    Args:
        shape: width, blocks, heads.
        num_classes: number of outputs.
        mels: number of bands of the features.
        dropout: dropout rate after each part of a block.
    """

    def __init__(self, shape: SpeechShape, num_classes: int, mels: int, dropout: float = 0.1):
        super().__init__()
        self.stem = SpeechStem(mels, shape.dim)
        self.blocks = nn.ModuleList(SpeechBlock(shape.dim, shape.num_heads, dropout) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.dim)
        self.head = nn.Linear(shape.dim, num_classes)

    def forward(self, features: Tensor, frames: Tensor | None = None) -> Tensor:
        """Return logits (B, K) for features (B, M, S). frames: frames of each audio clip, (B), by default all."""
        if frames is None:
            frames = torch.full(features.shape[:1], features.shape[-1], device=features.device)
        # Computed from the inputs alone, which every pipeline stage has.
        left_B = _halved(_halved(frames))
        heard_BT = _frame_mask(left_B, _halved(_halved(features.shape[-1])))
        x_BTD = self.stem(features, frames)
        for block in self.blocks:
            x_BTD = block(x_BTD, heard_BT)
        kept_BTD = self.norm(x_BTD) * heard_BT[..., None]
        return self.head(kept_BTD.sum(1) / left_B[:, None])


def build_speech_model(name: str, num_classes: int, mels: int, *, dropout: float = 0.1) -> nn.Module:
    """Build an encoder with random weights, drawn from torch's global generator.

    Args:
        name: one of `SPEECH_MODELS`.
        num_classes: number of outputs.
        mels: number of bands of its input.
        dropout: dropout rate after each part of a block.

    Raises:
        ModelError: if the name is unknown.
    """
    if name not in SPEECH_MODELS:
        hint = did_you_mean(name, SPEECH_MODELS) or f" Use one of {', '.join(SPEECH_MODELS)}."
        raise ModelError(f"model={name}: Weft has no network for audio of that name.{hint}")
    return SpeechEncoder(SPEECH_MODELS[name], num_classes, mels, dropout)


def _halved(count: Any) -> Any:
    return (count + _STRIDE - 1) // _STRIDE


def _frame_mask(frames_B: Tensor, length: int) -> Tensor:
    """Return a bool mask of the frames that belong to each audio clip, (B, length)."""
    return torch.arange(length, device=frames_B.device) < frames_B[:, None]
