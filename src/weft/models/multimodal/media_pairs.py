"""Two encoders side by side, whose vectors are near where picture or sound and text belong together.

As CLIP (Radford et al. 2021, arXiv 2103.00020). Letters: B samples, T tokens, N pictures, S pixels to a side, A
recordings, M mel bands, F frames, W width of the vectors.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.models.multimodal.towers import PictureTower, SoundTower, TextTower, encoder_tokens


class MediaPairs(nn.Module):
    """Gives a vector of a picture or a recording, and one of a text.

    Args:
        text: encoder of texts.
        vision: encoder of pictures.
        sound: encoder of recordings; None: the model hears nothing.
        width: of the vectors.
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
        """Return vectors of pictures or recordings, and of texts: (B, W) each.

        Args:
            input_ids: texts, (B, T).
            lengths: tokens of each, (B).
            media_index: number of each sample's picture, or of pictures and its recording, (B).
            pixels: (N, 3, S, S); None: `vision_states` are given.
            features: of recordings, (A, M, F).
            frames: of each recording, (A).
            vision_states: what the encoder of pictures gave, (N, patches, width).
            sound_states: what the encoder of recordings gave, (A, frames / 4, width).
        """
        seen = self.vision(pixels) if vision_states is None else vision_states
        found = [self.to_vectors["vision"](seen.mean(1))]
        if self.sound is not None and frames is not None:
            states = self.sound(features, frames) if sound_states is None else sound_states
            found.append(self.to_vectors["sound"](states.sum(1) / encoder_tokens(frames)[:, None]))
        texts = self.text(input_ids, lengths).sum(1) / lengths[:, None]
        return torch.cat(found)[media_index], self.to_vectors["text"](texts)
