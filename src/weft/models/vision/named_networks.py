"""Networks for images by name."""

from __future__ import annotations

from torch import nn

from weft.errors import ModelError, did_you_mean
from weft.models.vision.resnet import RESNETS, ResNet
from weft.models.vision.vgg import VGG, VGGS

#: All names that `build_image_model` knows; "_bn" has batch norms.
IMAGE_MODELS = (*RESNETS, *(f"{name}{norms}" for name in VGGS for norms in ("", "_bn")))
#: Images with fewer pixels to a side are small: a stem that halves them twice would leave too little.
_SMALL_SIDE = 64


def build_image_model(name: str, num_classes: int, side: int) -> nn.Module:
    """Build a network with new weights from torch's generator; parameters have torchvision's names.

    Args:
        name: one of `IMAGE_MODELS`.
        num_classes: outputs.
        side: pixels to a side; below 64 the stem keeps height and width.

    Raises:
        ModelError: for a name that is not known, or a side that is too small for it.
    """
    if name in RESNETS:
        return ResNet(RESNETS[name], num_classes, small_images=side < _SMALL_SIDE)
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
