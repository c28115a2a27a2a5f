"""Vision transformers, of Dosovitskiy et al. 2020 (arXiv 2010.11929), with the parameter names of transformers.

So published files such as those of google/vit-base-patch16-224 fill them. Letters: B batch, S pixels to a side,
T squares and one token for the class, D width, N heads, H head width, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Of the norms, and of new weights, as published.
_EPS, _INIT_STD = 1e-12, 0.02


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Width, blocks and heads; the layers inside of a block are 4 times as wide."""

    dim: int
    num_layers: int
    num_heads: int


#: The tiny one is that of Touvron et al. 2021 (arXiv 2012.12877).
VITS = {"vit-tiny": VisionShape(192, 12, 3), "vit-base": VisionShape(768, 12, 12)}


class VisionAttention(nn.Module):
    """Each token looks at all tokens of its picture."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.head_dim = dim // num_heads
        self.attention = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("query", "key", "value")})
        self.output = nn.ModuleDict({"dense": nn.Linear(dim, dim)})

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        q, k, v = (
            self.attention[name](x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        found_BNTH = F.scaled_dot_product_attention(q, k, v)
        return self.output["dense"](found_BNTH.transpose(1, 2).flatten(2))


class VisionBlock(nn.Module):
    """Attention, then two layers, each behind a norm and added to what came in.

    Args:
        dim: width.
        num_heads: of attention.
    """

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.attention = VisionAttention(dim, num_heads)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(dim, 4 * dim)})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * dim, dim)})
        self.layernorm_before = nn.LayerNorm(dim, eps=_EPS)
        self.layernorm_after = nn.LayerNorm(dim, eps=_EPS)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D) of (B, T, D)."""
        x_BTD = x_BTD + self.attention(self.layernorm_before(x_BTD))
        hidden = F.gelu(self.intermediate["dense"](self.layernorm_after(x_BTD)))
        return x_BTD + self.output["dense"](hidden)


class _Embeddings(nn.Module):
    """Squares of pixels as tokens, behind one that stands for the class, each with its place."""

    def __init__(self, dim: int, side: int, patch: int):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position_embeddings = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, dim))
        self.patch_embeddings = nn.ModuleDict({"projection": nn.Conv2d(3, dim, patch, stride=patch)})

    def forward(self, x_B3SS: Tensor) -> Tensor:
        x_BTD = self.patch_embeddings["projection"](x_B3SS).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(x_BTD), -1, -1), x_BTD], 1) + self.position_embeddings


class _Trunk(nn.Module):
    """All but the head, under the name that published files have for it."""

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
    """Names the class of a picture by the first token.

    Args:
        shape: of `VITS`.
        num_classes: outputs.
        side: pixels to a side of a picture.
        patch: pixels to a side of a square; divides `side`.
    """

    def __init__(self, shape: VisionShape, num_classes: int, side: int, patch: int):
        super().__init__()
        self.vit = _Trunk(shape, side, patch)
        self.classifier = nn.Linear(shape.dim, num_classes)
        self.reset_weights()

    def reset_weights(self) -> None:
        """Draw new weights: normal with a deviation of 0.02, cut at two deviations; biases and the head's are 0."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                nn.init.trunc_normal_(module.weight, std=_INIT_STD, a=-2 * _INIT_STD, b=2 * _INIT_STD)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        for param in (self.vit.embeddings.cls_token, self.vit.embeddings.position_embeddings):
            nn.init.trunc_normal_(param, std=_INIT_STD, a=-2 * _INIT_STD, b=2 * _INIT_STD)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, x_B3SS: Tensor) -> Tensor:
        """(B, 3, S, S) to (B, K)."""
        return self.classifier(self.vit(x_B3SS)[:, 0])
