"""Build a decoder from its spec."""

from __future__ import annotations

import torch

from weft.config.shapes.decoder_shape import DecoderSpec, shape_problems
from weft.errors import ModelError
from weft.models.decoder import Decoder
from weft.models.initialize import initialise


def build_decoder(
    spec: DecoderSpec, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None, seed: int = 0
) -> Decoder:
    """Build a decoder. On the meta device it has shapes only. Elsewhere its weights are initialized from `seed`.

    Args:
        spec: shape of the decoder.
        device: device of the parameters; None: cpu.
        dtype: dtype of the parameters; None: float32.
        seed: seed of the weights.

    Raises:
        ModelError: if the shape breaks a rule; the message lists every broken rule.
    """
    problems = shape_problems(spec)
    if problems:
        raise ModelError("\n".join(str(problem) for problem in problems))
    # On the meta device torch draws no initial weights, which would take time and advance the global generator.
    with torch.device("meta"):
        decoder = Decoder(spec).to(dtype or torch.float32)
    place = torch.device(device or "cpu")
    if place.type != "meta":
        decoder.to_empty(device=place)
        initialise(decoder, seed)
    return decoder
