"""Image networks match their published implementations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.errors import ModelError
from weft.models.vision import build_image_model

#: First two outputs of two images from torchvision 0.28, with weights and pixels of `fill` and `pixels`.
TORCHVISION = {
    "resnet18": (-1.657374330211237, 1.2823664989413956, -1.7263378067611814, 1.2503648941056658),
    "resnet34": (-0.042496164793434106, -1.4682277903993783, -0.07421833276729602, -1.4736567391425028),
    "resnet50": (-13.768410306343114, 6.5434557788767345, -13.786952487593897, 6.525829207319849),
    "vgg11": (-2.335216665524309, -1.0494442170336613, -2.3352175993181445, -1.0494443000737845),
}


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill each tensor with values that depend on the position of its name and on its indices."""
    for place, (name, tensor) in enumerate(sorted(model.state_dict().items())):
        if not tensor.is_floating_point():
            continue
        waves = torch.sin(torch.arange(tensor.numel(), dtype=torch.float64) * 0.37 + place)
        if name.endswith("running_var"):
            waves = 1 + 0.5 * waves
        elif tensor.dim() > 1:
            waves *= (2 / tensor[0].numel()) ** 0.5
        else:
            waves = waves * 0.1 + (1.0 if name.endswith("weight") else 0)
        tensor.copy_(waves.view(tensor.shape))


def pixels() -> torch.Tensor:
    return torch.cos(torch.arange(2 * 3 * 64 * 64, dtype=torch.float64) * 0.11).view(2, 3, 64, 64)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name == "vgg11")) for name in TORCHVISION]
)
def test_network_matches_torchvision(name: str):
    with torch.device("meta"):
        model = build_image_model(name, 10, 224)
    model = model.double().to_empty(device="cpu").eval()
    fill(model)
    with torch.no_grad():
        found = model(pixels())[:, :2].flatten()
    torch.testing.assert_close(found, torch.tensor(TORCHVISION[name], dtype=torch.float64), rtol=1e-9, atol=0.0)


def test_vision_transformer_matches_transformers():
    transformers = pytest.importorskip("transformers")
    own = build_image_model("vit-tiny", 7, 32).double()
    torch.manual_seed(2)
    with torch.no_grad():
        own.get_parameter("classifier.weight").normal_()
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=32,
        patch_size=4, num_labels=7, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    published = transformers.ViTForImageClassification(config).double()
    # Load through transformers' reader: names inside its model differ between releases.
    published = type(published).from_pretrained(None, config=config, state_dict=own.state_dict(), dtype=torch.float64)
    picture = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(own(picture), published.eval()(picture).logits, rtol=1e-10, atol=1e-10)


def test_image_size_not_divisible_by_patches_is_rejected():
    with pytest.raises(
        ModelError, match=r"^side=100: vit-base divides an image into squares of 16 pixels\. Use a multip"
    ):
        build_image_model("vit-base", 10, 100)
