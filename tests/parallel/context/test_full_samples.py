"""Models of which every cp rank gets full samples match one process: images, padding, dropout and unused towers."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.parity.cases import LLAMA
from weft.errors import WeftWarning
from weft.verify.parity import DecoderCase, train_case

_TEXT = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": None,
}  # fmt: skip
_IMAGES = {
    "image_size": 12, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24,
    "num_attention_heads": 4,
}  # fmt: skip
#: The token that stands for a patch of an image.
_IMAGE_TOKEN = 63


def build_vit(dropout: float = 0.0) -> Any:
    """Return an image classifier. Its 10 tokens, with the class token, are no multiple of 4."""
    from transformers import ViTConfig, ViTForImageClassification

    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return ViTForImageClassification(ViTConfig(**_IMAGES, **drops, num_labels=5))


def build_llava() -> Any:
    """Return a model whose image features replace tokens of its text."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision, text = CLIPVisionConfig(**_IMAGES), LlamaConfig(**_TEXT)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_id=_IMAGE_TOKEN,
            image_seq_length=9,
            vision_feature_layer=-2,
        )
    )


@dataclasses.dataclass(frozen=True)
class ImageCase(DecoderCase):
    """Images and their classes. The loss counts one sample for each image."""

    dropout: float = 0.0

    def model(self):
        torch.manual_seed(0)
        return build_vit(self.dropout).double()

    def batch(self, step):
        rng = torch.Generator().manual_seed(step)
        images = torch.randn((8, 3, 12, 12), generator=rng, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.randint(5, (8,), generator=rng)}

    def forward(self, model, batch):
        return model(pixel_values=batch["pixel_values"]).logits

    def loss(self, output, batch):
        return F.cross_entropy(output, batch["labels"], reduction="sum"), torch.tensor(len(output))


@dataclasses.dataclass(frozen=True)
class MixedCase(DecoderCase):
    """Texts of 14 tokens, which begin with an image in odd steps and are text alone in the others."""

    def model(self):
        torch.manual_seed(0)
        return build_llava().double()

    def batch(self, step):
        rng = torch.Generator().manual_seed(step)
        ids = torch.randint(60, (8, 14), generator=rng)
        labels = torch.randint(60, (8, 14), generator=rng)
        labels[::3, 9:] = -100
        if step % 2 == 0:
            return {"input_ids": ids, "labels": labels}
        ids[:, :9] = _IMAGE_TOKEN
        images = torch.randn((8, 3, 12, 12), generator=rng, dtype=torch.float64)
        return {"input_ids": ids, "labels": labels, "pixel_values": images}

    def forward(self, model, batch):
        return model(**{name: value for name, value in batch.items() if name != "labels"}).logits

    def loss(self, output, batch):
        labels = batch["labels"]
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


CASES = {
    "images": ImageCase(LLAMA, num_steps=2, optimizer="sgd"),
    "dropout": ImageCase(LLAMA, num_steps=2, optimizer="sgd", dropout=0.2),
    "mixed": MixedCase(LLAMA, num_steps=2, optimizer="sgd"),
}


def train_each(plan, names=tuple(CASES)):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WeftWarning)
        return {name: train_case(plan, CASES[name]) for name in names}


def _check(found, names=tuple(CASES)):
    for name in names:
        expected = train_case("precision=fp64", CASES[name])
        assert found[name].losses == pytest.approx(expected.losses, rel=1e-12), name
        for param, grad in expected.grads.items():
            scale = max(1e-9, float(grad.abs().max()))
            assert float((found[name].grads[param] - grad).abs().max()) / scale < 1e-10, f"{name}: {param}"


def test_full_samples_match_one_process(ranks2):
    _check(ranks2.run(train_each, "cp=2 precision=fp64")[0])


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    ["cp=4", "cp=2 tp=2", "cp=2 dp_shard=2 zero=3 recompute=full", "cp=2 dp_replicate=2 microbatches=2"],
)
def test_full_samples_with_other_axes_match_one_process(plan, ranks4):
    _check(ranks4.run(train_each, f"{plan} precision=fp64")[0])
