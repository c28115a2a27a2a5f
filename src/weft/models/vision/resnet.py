"""Residual networks, of He et al. 2015 (arXiv 1512.03385), with the parameter names of torchvision.

Letters: B batch, C channels, H and W height and width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


@dataclass(frozen=True, slots=True)
class ResNetSpec:
    """A residual network. depths: blocks of the four stages. is_wide: their output has four times the channels."""

    depths: tuple[int, int, int, int]
    is_wide: bool


#: By name, as published.
RESNETS = {
    "resnet18": ResNetSpec((2, 2, 2, 2), is_wide=False),
    "resnet34": ResNetSpec((3, 4, 6, 3), is_wide=False),
    "resnet50": ResNetSpec((3, 4, 6, 3), is_wide=True),
}


class PlainBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut. stride: of the first one."""

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
        """(B, dim_in, H, W) to (B, dim, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x_BCHW)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x_BCHW))


class WideBlock(nn.Module):
    """A 3x3 convolution with the stride, between two of 1x1, the last of which has four times the channels."""

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
        """(B, dim_in, H, W) to (B, 4 dim, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x_BCHW)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + self.downsample(x_BCHW))


class ResNet(nn.Module):
    """A residual network for images of three channels.

    Args:
        spec: depths and kind of block.
        num_classes: outputs.
        norm: makes a norm of so many channels.
        small_images: for images of about 32 pixels: a 3x3 stem that keeps height and width, and no pooling after it.
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
        """Draw new weights: of convolutions normal by fan-out (He et al. 2015, arXiv 1502.01852), norms at one."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, K)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x_BCHW))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def _shortcut(dim_in: int, dim: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and dim_in == dim:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(dim_in, dim, 1, stride, bias=False), norm(dim))
