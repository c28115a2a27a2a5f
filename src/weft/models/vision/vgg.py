"""Networks of plain convolutions, of Simonyan and Zisserman 2014 (arXiv 1409.1556), with torchvision's parameter names.

Letters: B batch, C channels, H and W height and width, K classes.
"""

from __future__ import annotations

from torch import Tensor, nn

#: Channels of the convolutions of each stage, between which pooling halves height and width.
VGGS = {
    "vgg11": ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    "vgg16": ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)),
}


class VGG(nn.Module):
    """Convolutions, then three linear layers.

    Args:
        stages: of `VGGS`.
        num_classes: outputs.
        has_norms: a batch norm behind each convolution.
        side: what the last convolutions are pooled to before the linear layers: 7 as published, 1 for small images.
        hidden: width of the linear layers.
        dropout: rate between them.
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
        """Draw new weights: of convolutions normal by fan-out, of linear layers with a deviation of 0.01."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                assert module.bias is not None
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, 0.01)
                nn.init.zeros_(module.bias)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, K)."""
        return self.classifier(self.avgpool(self.features(x_BCHW)).flatten(1))
