"""What a model is made of: the shape of a decoder, the known sizes, and what a Hugging Face config says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.lazy import loads

__all__ = [
    "DecoderSpec",
    "DecoderWidths",
    "LayerSpec",
    "ModelSpec",
    "config_of_decoder",
    "decoder_shape",
    "decoder_spec",
    "image_shape",
    "model_names",
    "named_sizes",
    "number",
    "read_numbers",
    "resize",
    "resolve_decoder",
    "shape_problems",
    "size_hides",
]

if TYPE_CHECKING:
    from weft.spec.model.decoder import DecoderSpec
    from weft.spec.model.hugging_face_config import (
        config_of_decoder,
        decoder_shape,
        image_shape,
        number,
        read_numbers,
        resize,
    )
    from weft.spec.model.model_spec import (
        LayerSpec,
        ModelSpec,
        decoder_spec,
        model_names,
        named_sizes,
        resolve_decoder,
        size_hides,
    )
    from weft.spec.model.shape_rules import shape_problems
    from weft.spec.model.widths import DecoderWidths

__getattr__ = loads(
    __name__,
    {
        "DecoderSpec": ".decoder",
        "DecoderWidths": ".widths",
        "LayerSpec": ".model_spec",
        "ModelSpec": ".model_spec",
        "config_of_decoder": ".hugging_face_config",
        "decoder_shape": ".hugging_face_config",
        "decoder_spec": ".model_spec",
        "image_shape": ".hugging_face_config",
        "model_names": ".model_spec",
        "named_sizes": ".model_spec",
        "number": ".hugging_face_config",
        "read_numbers": ".hugging_face_config",
        "resize": ".hugging_face_config",
        "resolve_decoder": ".model_spec",
        "shape_problems": ".shape_rules",
        "size_hides": ".model_spec",
    },
)
