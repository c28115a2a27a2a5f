"""Subjects for `weft verify --all`: vision and audio models, with zero, one or three images in a sample.

weft verify --model tests.parity.vision_subjects:llava --all 2 --global-batch 5 --steps 2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.parity import encoder_cases as encoders
from tests.parity import vision_cases as vision
from weft.models.vision import build_image_model

SAMPLES, CLASSES = 15, 5


def _subject_of_case(name: str) -> tuple[nn.Module, DataLoader[Any]]:
    case, _ = encoders.CASES[name]
    dataset: Any = case.data(SAMPLES)
    return case.make(), DataLoader(dataset, collate_fn=case.collate)


def llava() -> tuple[nn.Module, DataLoader[Any]]:
    return _subject_of_case("llava")


def qwen2_vl() -> tuple[nn.Module, DataLoader[Any]]:
    return _subject_of_case("qwen2_vl")


def whisper() -> tuple[nn.Module, DataLoader[Any]]:
    return _subject_of_case("whisper")


def _images(step: int, size: int, side: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(step)
    images = torch.randn(size, 3, side, side, generator=rng, dtype=torch.float64)
    return {"pixel_values": images, "labels": torch.randint(CLASSES, (size,), generator=rng)}


def vit() -> tuple[nn.Module, Any]:
    torch.manual_seed(5)
    config = vision.transformers().ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=4,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return vision._larger_weights(vision.transformers().ViTForImageClassification(config)), vit_batch


def vit_batch(step: int, size: int) -> dict[str, torch.Tensor]:
    return _images(step, size, 8)


def clip() -> nn.Module:
    """Return CLIP with both towers, whose loss is contrastive."""
    torch.manual_seed(5)
    width = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = vision.transformers().CLIPConfig(
        text_config={**width, "vocab_size": 29, "max_position_embeddings": 40, "eos_token_id": 2, "projection_dim": 8},
        vision_config={**width, "image_size": 8, "patch_size": 4, "projection_dim": 8},
        projection_dim=8,
    )
    return vision._larger_weights(vision.transformers().CLIPModel(config))


def _batch_of_rows(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = _images(step, size, 32)
    return batch["pixel_values"], batch["labels"]


def resnet() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(5)
    return build_image_model("resnet18", CLASSES, 32), _batch_of_rows, _cross_entropy


def vgg() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(5)
    return build_image_model("vgg11_bn", CLASSES, 32), _batch_of_rows, _cross_entropy


def vit_tiny() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(5)
    model = build_image_model("vit-tiny", CLASSES, 32)
    nn.init.normal_(model.classifier.weight)
    return model, _batch_of_rows, _cross_entropy


def _cross_entropy(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(output)
