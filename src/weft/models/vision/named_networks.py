"""Networks for images by name."""

from __future__ import annotations

from torch import nn

from weft.errors import ModelError, did_you_mean
from weft.models.vision.resnet import RESNETS, ResNet
from weft.models.vision.vgg import VGG, VGGS
from weft.models.vision.vit import VITS, VisionTransformer

#: All names that `build_image_model` knows; "_bn" has batch norms.
IMAGE_MODELS = (*RESNETS, *(f"{name}{norms}" for name in VGGS for norms in ("", "_bn")), *VITS)
#: Images with fewer pixels to a side are small: a stem that halves them twice would leave too little.
_SMALL_SIDE = 64
#: Pixels to a side of a vision transformer's squares, of large and of small images.
_PATCH, _SMALL_PATCH = 16, 4


def build_image_model(name: str, num_classes: int, side: int) -> nn.Module:
    """Build a network with new weights from torch's generator.

    Parameters have torchvision's names; those of vision transformers have the names of transformers' files.

    Args:
        name: one of `IMAGE_MODELS`.
        num_classes: outputs.
        side: pixels to a side. Below 64 a ResNet's stem keeps height and width, and a vision transformer's squares have
            4 pixels to a side in place of 16.

    Raises:
        ModelError: for a name that is not known, or a side that is too small for it.
    """
    if name in RESNETS:
        return ResNet(RESNETS[name], num_classes, small_images=side < _SMALL_SIDE)
    if name in VITS:
        patch = _SMALL_PATCH if side < _SMALL_SIDE else _PATCH
        if side % patch:
            raise ModelError(
                f"side={side}: {name} cuts a picture into squares of {patch} pixels. Use a multiple of {patch}."
            )
        return VisionTransformer(VITS[name], num_classes, side, patch)
    stages = VGGS.get(name.removesuffix("_bn"))
    if stages is None:
        hint = did_you_mean(name, IMAGE_MODELS) or f" Use one of {', '.join(IMAGE_MODELS)}."
        raise ModelError(f"model={name}: Weft has no network of that name.{hint}")
    if side < 2 ** len(stages):
        raise ModelError(
            f"side={side}: {name} halves a picture {len(stages)} times. Use {2 ** len(stages)} pixels or more."
        )
    small = {"side": 1, "hidden": 512} if side < _SMALL_SIDE else {}
    return VGG(stages, num_classes, has_norms=name.endswith("_bn"), **small)
