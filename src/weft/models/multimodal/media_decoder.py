"""A decoder that reads pictures and sound among its tokens, as LLaVA does (arXiv 2304.08485).

All pictures of a batch go through their encoder in one call, and all recordings through theirs. What an encoder gives
becomes rows of the text's width, and `media_index` says at which token each row stands.

Letters: B samples, T tokens, N pictures, S pixels to a side, A recordings, M mel bands, F frames, P rows of a picture,
Q rows of a recording, D width of the text.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.models.multimodal.towers import SOUNDS_JOINED, PictureTower, SoundTower
from weft.models.transformer import Decoder

#: Patches to a side of the square that becomes one token of the text.
PATCHES_JOINED = 2


class MediaDecoder(nn.Module):
    """Writes text after pictures, sound and text.

    Args:
        text: the decoder.
        vision: encoder of pictures.
        sound: encoder of recordings; None: the model hears nothing.
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
            media_index: the row that stands in place of a token, counted over the rows of all pictures and then of all
                recordings; -1: the token itself. (B, T)
            pixels: (N, 3, S, S); None: `vision_states` are given.
            features: of recordings, (A, M, F).
            frames: of each recording, (A).
            vision_states: what the encoder of pictures gave, (N, patches, width).
            sound_states: what the encoder of recordings gave, (A, frames / 4, width).
        """
        rows = [_squares(self.vision(pixels) if vision_states is None else vision_states, self.join_vision)]
        if self.sound is not None:
            states = self.sound(features, frames) if sound_states is None else sound_states
            rows.append(_neighbours(states, self.join_sound))
        return self.text(input_ids, features_ND=torch.cat(rows), feature_index_BT=media_index)

    def get_output_embeddings(self) -> nn.Module:
        """Return the layer that makes the logits, under the name that transformers asks for it."""
        return self.text.head


def _squares(states_NTD: Tensor, join: nn.Linear) -> Tensor:
    """Rows of pictures, (N * P, D): of squares of patches."""
    grid = round(states_NTD.shape[1] ** 0.5)
    x = states_NTD.unflatten(1, (grid // PATCHES_JOINED, PATCHES_JOINED, grid // PATCHES_JOINED, PATCHES_JOINED))
    return join(x.transpose(2, 3).flatten(3).flatten(1, 2).flatten(2)).flatten(0, 1)


def _neighbours(states_ATD: Tensor, join: nn.Linear | None) -> Tensor:
    """Rows of recordings, (A * Q, D): of tokens that follow one another."""
    assert join is not None
    odd = -states_ATD.shape[1] % SOUNDS_JOINED
    filled = nn.functional.pad(states_ATD, (0, 0, 0, odd))
    return join(filled.unflatten(1, (-1, SOUNDS_JOINED)).flatten(2)).flatten(0, 1)
