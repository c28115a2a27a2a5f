"""Image classifiers: residual networks (He et al. 2015, arXiv 1512.03385), VGG and vision transformers.

Parameters have the names of torchvision. Parameters of vision transformers have the names of transformers.

Letters: B batch, C channels, H and W height and width, T tokens, D width, S pixels per side, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.errors import ModelError, did_you_mean

Norm = Callable[[int], nn.Module]


@dataclass(frozen=True, slots=True)
class ResNetSpec:
    """A residual network.

    Attributes:
        depths: numbers of blocks of the four stages.
        is_wide: True for bottleneck blocks (`WideBlock`), whose outputs have four times the channels.
    """

    depths: tuple[int, int, int, int]
    is_wide: bool


#: By name, as published.
RESNETS = {
    "resnet18": ResNetSpec((2, 2, 2, 2), is_wide=False),
    "resnet34": ResNetSpec((3, 4, 6, 3), is_wide=False),
    "resnet50": ResNetSpec((3, 4, 6, 3), is_wide=True),
}


class PlainBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut. stride: stride of the first one."""

    expansion = 1

    def __init__(self, dim_in: int, dim: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(dim_in, dim, 3, stride, 1, bias=False)
        self.bn1 = norm(dim)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(dim, dim, 3, 1, 1, bias=False)
        self.bn2 = norm(dim)
        self.downsample = _shortcut(dim_in, dim, stride, norm)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute the block: (B, dim_in, H, W) to (B, dim, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x_BCHW)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x_BCHW))


class WideBlock(nn.Module):
    """A strided 3x3 convolution between two 1x1 convolutions, with a shortcut. The output has 4 * dim channels."""

    expansion = 4

    def __init__(self, dim_in: int, dim: int, stride: int, norm: Norm):
        super().__init__()
        wide = dim * self.expansion
        self.conv1 = nn.Conv2d(dim_in, dim, 1, bias=False)
        self.bn1 = norm(dim)
        self.conv2 = nn.Conv2d(dim, dim, 3, stride, 1, bias=False)
        self.bn2 = norm(dim)
        self.conv3 = nn.Conv2d(dim, wide, 1, bias=False)
        self.bn3 = norm(wide)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(dim_in, wide, stride, norm)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute the block: (B, dim_in, H, W) to (B, 4 dim, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x_BCHW)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + self.downsample(x_BCHW))


class ResNet(nn.Module):
    """A residual network for images of three channels.

    Args:
        spec: depths and kind of block.
        num_classes: number of outputs.
        norm: builds a norm from its number of channels.
        small_images: for images of about 32 pixels: a 3x3 stem that keeps height and width, without pooling after it.
    """

    def __init__(self, spec: ResNetSpec, num_classes: int, norm: Norm = nn.BatchNorm2d, small_images: bool = False):
        super().__init__()
        kind = WideBlock if spec.is_wide else PlainBlock
        self.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False) if small_images else nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = norm(64)
        self.relu = nn.ReLU()
        self.maxpool: nn.Module = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        stages, dim_in = [], 64
        for place, depth in enumerate(spec.depths):
            dim = 64 * 2**place
            blocks = []
            for index in range(depth):
                blocks.append(kind(dim_in, dim, 2 if place and not index else 1, norm))
                dim_in = dim * kind.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(dim_in, num_classes)
        self.reset_weights()

    def reset_weights(self) -> None:
        """Reset convolutions to normal weights by fan-out (He et al. 2015, arXiv 1502.01852)."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute logits: (B, 3, H, W) to (B, K)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x_BCHW))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _shortcut(dim_in: int, dim: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and dim_in == dim:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(dim_in, dim, 1, stride, bias=False), norm(dim))


# Networks of plain convolutions, of Simonyan and Zisserman 2014 (arXiv 1409.1556), with torchvision's parameter
# names.

#: Channels of the convolutions of each stage. Pooling between stages halves height and width.
VGGS = {
    "vgg11": ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    "vgg16": ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)),
}


class VGG(nn.Module):
    """Convolutions, then three linear layers.

    Args:
        stages: channels of the convolutions, from `VGGS`.
        num_classes: number of outputs.
        has_norms: True for a batch norm after each convolution.
        side: height and width after pooling, before the linear layers: 7 as published, 1 for small images.
        hidden: width of the linear layers.
        dropout: dropout rate between them.
    """

    def __init__(
        self,
        stages: tuple[tuple[int, ...], ...],
        num_classes: int,
        *,
        has_norms: bool = False,
        side: int = 7,
        hidden: int = 4096,
        dropout: float = 0.5,
    ):
        super().__init__()
        layers: list[nn.Module] = []
        dim_in = 3
        for stage in stages:
            for dim in stage:
                layers.append(nn.Conv2d(dim_in, dim, 3, padding=1))
                layers += [nn.BatchNorm2d(dim)] * has_norms + [nn.ReLU()]
                dim_in = dim
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = nn.Sequential(
            nn.Linear(dim_in * side**2, hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )  # fmt: skip
        self.reset_weights()

    def reset_weights(self) -> None:
        """Reset convolutions to normal weights by fan-out, linear weights to normal with std 0.01, and biases to 0."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Compute logits: (B, 3, H, W) to (B, K)."""
        return self.classifier(self.avgpool(self.features(x_BCHW)).flatten(1))


# Vision transformers, of Dosovitskiy et al. 2020 (arXiv 2010.11929), with the parameter names of transformers.

#: Epsilon of the norms and standard deviation of new weights, as published.
_EPS, _INIT_STD = 1e-12, 0.02


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Width, blocks and heads. The feed-forward layers are 4 times as wide."""

    dim: int
    num_layers: int
    num_heads: int


#: vit-tiny is from Touvron et al. 2021 (arXiv 2012.12877).
VITS = {"vit-tiny": VisionShape(192, 12, 3), "vit-base": VisionShape(768, 12, 12)}


class VisionAttention(nn.Module):
    """Attention over all tokens of an image."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.head_dim = dim // num_heads
        self.attention = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("query", "key", "value")})
        self.output = nn.ModuleDict({"dense": nn.Linear(dim, dim)})

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute attention: (B, T, D) to (B, T, D)."""
        q, k, v = (
            self.attention[name](x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        found_BNTH = F.scaled_dot_product_attention(q, k, v)
        return self.output["dense"](found_BNTH.transpose(1, 2).flatten(2))


class VisionBlock(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.attention = VisionAttention(dim, num_heads)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(dim, 4 * dim)})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * dim, dim)})
        self.layernorm_before = nn.LayerNorm(dim, eps=_EPS)
        self.layernorm_after = nn.LayerNorm(dim, eps=_EPS)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Compute the block: (B, T, D) to (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.layernorm_before(x_BTD))
        hidden = F.gelu(self.intermediate["dense"](self.layernorm_after(x_BTD)))
        return x_BTD + self.output["dense"](hidden)


class _Embeddings(nn.Module):
    def __init__(self, dim: int, side: int, patch: int):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position_embeddings = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, dim))
        self.patch_embeddings = nn.ModuleDict({"projection": nn.Conv2d(3, dim, patch, stride=patch)})

    def forward(self, x_B3SS: Tensor) -> Tensor:
        x_BTD = self.patch_embeddings["projection"](x_B3SS).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(x_BTD), -1, -1), x_BTD], 1) + self.position_embeddings


class _Trunk(nn.Module):
    """All layers but the head, under the module name that published files use."""

    def __init__(self, shape: VisionShape, side: int, patch: int):
        super().__init__()
        self.embeddings = _Embeddings(shape.dim, side, patch)
        blocks = nn.ModuleList(VisionBlock(shape.dim, shape.num_heads) for _ in range(shape.num_layers))
        self.encoder = nn.ModuleDict({"layer": blocks})
        self.layernorm = nn.LayerNorm(shape.dim, eps=_EPS)

    def forward(self, x_B3SS: Tensor) -> Tensor:
        x_BTD = self.embeddings(x_B3SS)
        for block in self.encoder["layer"].children():
            x_BTD = block(x_BTD)
        return self.layernorm(x_BTD)


class VisionTransformer(nn.Module):
    """Image classifier that reads the class from the first token.

    Args:
        shape: shape from `VITS`.
        num_classes: number of outputs.
        side: pixels per side of an image.
        patch: pixels per side of a patch; divides `side`.
    """

    def __init__(self, shape: VisionShape, num_classes: int, side: int, patch: int):
        super().__init__()
        self.vit = _Trunk(shape, side, patch)
        self.classifier = nn.Linear(shape.dim, num_classes)
        self.reset_weights()

    def reset_weights(self) -> None:
        """Reset weights to a normal with std 0.02, truncated at two std, and biases and the head's weight to 0."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=_INIT_STD, a=-2 * _INIT_STD, b=2 * _INIT_STD)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for param in (self.vit.embeddings.cls_token, self.vit.embeddings.position_embeddings):
            nn.init.trunc_normal_(param, std=_INIT_STD, a=-2 * _INIT_STD, b=2 * _INIT_STD)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, x_B3SS: Tensor) -> Tensor:
        """Compute logits: (B, 3, S, S) to (B, K)."""
        return self.classifier(self.vit(x_B3SS)[:, 0])


# Image networks by name.

#: All model names of `build_image_model`; "_bn" marks batch norms.
IMAGE_MODELS = (*RESNETS, *(f"{name}{norms}" for name in VGGS for norms in ("", "_bn")), *VITS)
#: Smaller images use another stem, because one that halves them twice would leave too few pixels.
_SMALL_SIDE = 64
#: Pixels per side of a vision transformer's patches, for large and for small images.
_PATCH, _SMALL_PATCH = 16, 4


def build_image_model(name: str, num_classes: int, side: int) -> nn.Module:
    """Build a network with random weights, drawn from torch's global generator.

    Parameters are named as in torchvision. Those of vision transformers are named as in transformers' checkpoints.

    Args:
        name: one of `IMAGE_MODELS`.
        num_classes: number of outputs.
        side: pixels per side. Below 64, the stem of a ResNet does not downsample, vision transformers use patches of
            4 x 4 pixels instead of 16 x 16, and the linear layers of a VGG read 1 x 1 features and have a width of 512.

    Raises:
        ModelError: if the name is unknown or the side does not fit the network.
    """
    if name in RESNETS:
        return ResNet(RESNETS[name], num_classes, small_images=side < _SMALL_SIDE)
    if name in VITS:
        patch = _SMALL_PATCH if side < _SMALL_SIDE else _PATCH
        if side % patch:
            raise ModelError(
                f"side={side}: {name} divides an image into squares of {patch} pixels. Use a multiple of {patch}."
            )
        return VisionTransformer(VITS[name], num_classes, side, patch)
    stages = VGGS.get(name.removesuffix("_bn"))
    if stages is None:
        hint = did_you_mean(name, IMAGE_MODELS) or f" Use one of {', '.join(IMAGE_MODELS)}."
        raise ModelError(f"model={name}: Weft has no network of that name.{hint}")
    if side < 2 ** len(stages):
        raise ModelError(
            f"side={side}: {name} halves an image {len(stages)} times. Use {2 ** len(stages)} pixels or more."
        )
    small = {"side": 1, "hidden": 512} if side < _SMALL_SIDE else {}
    return VGG(stages, num_classes, has_norms=name.endswith("_bn"), **small)
