"""Networks for images, with the parameter names of torchvision, and of transformers for vision transformers."""

from __future__ import annotations

from weft.models.vision.named_networks import IMAGE_MODELS, build_image_model

__all__ = ["IMAGE_MODELS", "build_image_model"]
