"""Two small vision-language models of transformers, and samples with zero, one or two images.

A row of pixel values is an image in LLaVA, and a patch in Qwen2-VL, where images have different numbers of patches.
B samples, T tokens, N images, P patches.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.parity.ragged_cases import run_of
from weft.train.tasks.decoder_loss import token_cross_entropy
from weft.verify.parity import ParityResult, SampleCase, train_case, train_plain
from weft.verify.verifier import Float64Throughout

VOCAB, IMAGE, LAYERS = 61, 60, 2
#: Pixels of an image's side and of a patch's side. An image has 4 tokens in LLaVA.
SIDE, PATCH = 8, 4
IGNORE = -100
Sample = dict[str, torch.Tensor]


def transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    return importlib.import_module("transformers")


def _larger_weights(model: nn.Module) -> nn.Module:
    """Scale up weights and set biases, so that errors in them are visible."""
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "bias" in name:
                param.normal_(std=0.1)
            elif param.ndim > 1:
                param.mul_(3.0)
    return model


def llava_model() -> nn.Module:
    torch.manual_seed(5)
    config = transformers().LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "projection_dim": 8,
        },
        text_config={
            "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24,
            "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 64,
        },
        image_token_id=IMAGE, vision_feature_layer=-1,
    )  # fmt: skip
    return _larger_weights(transformers().LlavaForConditionalGeneration(config))


def qwen2_vl_model() -> nn.Module:
    torch.manual_seed(5)
    config = transformers().Qwen2VLConfig(
        vision_config={
            "depth": LAYERS, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "mlp_ratio": 2, "patch_size": PATCH,
            "temporal_patch_size": 1, "spatial_merge_size": 2, "in_channels": 3,
        },
        text_config={
            "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0},
        },
        image_token_id=IMAGE, video_token_id=VOCAB - 2, vision_start_token_id=1, vision_end_token_id=2,
    )  # fmt: skip
    return _larger_weights(transformers().Qwen2VLForConditionalGeneration(config))


def _text(rng: torch.Generator, index: int, image_tokens: int) -> Sample:
    """Return two to five text tokens around the image tokens. The third of every four samples has no label."""
    text_ids = torch.randint(3, VOCAB - 2, (2 + index % 4,), generator=rng)
    ids = torch.cat([text_ids[:1], torch.full((image_tokens,), IMAGE), text_ids[1:]])
    labels = torch.where((ids == IMAGE) | (index % 4 == 2), IGNORE, ids).roll(-1)
    return {"input_ids": ids, "labels": labels}


def llava_samples(count: int) -> list[Sample]:
    """Return samples with one, zero and two images in turn."""
    rng, found = torch.Generator().manual_seed(7), []
    for index in range(count):
        images = torch.randn((1, 0, 2)[index % 3], 3, SIDE, SIDE, generator=rng)
        found.append({**_text(rng, index, 4 * len(images)), "pixel_values": images})
    return found


def qwen2_vl_samples(count: int) -> list[Sample]:
    """Return samples with an image of 4 to 16 patches, four per token. The second of every three has no image."""
    rng, found = torch.Generator().manual_seed(7), []
    for index in range(count):
        grids = torch.tensor([[1, 2, 2 + 2 * (index % 4)]] * (1, 0, 1)[index % 3], dtype=torch.long).view(-1, 3)
        patches = torch.randn(int(grids.prod(-1).sum()), 3 * PATCH**2, generator=rng)
        sample = {**_text(rng, index, len(patches) // 4), "pixel_values": patches, "image_grid_thw": grids}
        found.append({**sample, "mm_token_type_ids": (sample["input_ids"] == IMAGE).long()})
    return found


#: Padding value of each per-token entry.
PADDING = {"input_ids": 0, "labels": IGNORE, "attention_mask": 0, "mm_token_type_ids": 0}


def collate(samples: list[Sample]) -> Sample:
    """Pad texts to the longest and concatenate images and patches. Entries without any element are left out."""
    batch = {}
    for name in {**samples[0], "attention_mask": None}:
        rows = [one[name] if name in one else torch.ones_like(one["input_ids"]) for one in samples]
        is_text = name in PADDING
        batch[name] = pad_sequence(rows, batch_first=True, padding_value=PADDING[name]) if is_text else torch.cat(rows)
    return {name: value for name, value in batch.items() if len(value)}


def with_blank(samples: list[Sample]) -> Sample:
    """Like `collate`, but if no sample has an image, append a masked blank image to the first.

    Under zero=3 all ranks must call the vision tower.
    """
    first, pixels = samples[0], samples[0]["pixel_values"]
    if any(len(one["pixel_values"]) for one in samples):
        return collate(samples)
    count = 1 if pixels.ndim == 4 else 4  # one image or its four patches; four tokens or one
    blank = {
        "input_ids": torch.full((4 // count,), IMAGE), "labels": torch.full((4 // count,), IGNORE),
        "attention_mask": torch.zeros(4 // count, dtype=torch.long),
        "mm_token_type_ids": torch.ones(4 // count, dtype=torch.long),
        "pixel_values": pixels.new_zeros(count, *pixels.shape[1:]), "image_grid_thw": torch.tensor([[1, 2, 2]]),
    }  # fmt: skip
    masked = {**first, "attention_mask": torch.ones_like(first["input_ids"])}
    return collate([{name: torch.cat([value, blank[name]]) for name, value in masked.items()}, *samples[1:]])


@dataclass(frozen=True)
class VisionCase(SampleCase):
    """One of the models on two batches that do not divide evenly."""

    make: Callable[[], nn.Module]
    data: Callable[[int], list[Sample]]
    num_steps: int = 2
    global_batch: int = 5
    max_grad_norm: float = 0.5

    def model(self) -> nn.Module:
        return self.make().double()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)

    def samples(self, step: int) -> list[Sample]:
        return self.data(self.global_batch * (step + 1))[-self.global_batch :]

    def collate(self, samples: list[Sample]) -> Sample:
        return {name: one.double() if one.is_floating_point() else one for name, one in with_blank(samples).items()}

    def forward(self, model: nn.Module, batch: Sample) -> torch.Tensor:
        return model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits

    def loss(self, output: torch.Tensor, batch: Sample) -> tuple[torch.Tensor, torch.Tensor]:
        return token_cross_entropy(output, batch)


CASES = {"llava": VisionCase(llava_model, llava_samples), "qwen2_vl": VisionCase(qwen2_vl_model, qwen2_vl_samples)}


def llava() -> tuple[nn.Module, DataLoader]:
    """Return model and loader as a user passes them to `weft verify`."""
    return llava_model(), DataLoader(llava_samples(24), collate_fn=with_blank)


def qwen2_vl() -> tuple[nn.Module, DataLoader]:
    return qwen2_vl_model(), DataLoader(qwen2_vl_samples(24), collate_fn=with_blank)


def without_blanks() -> tuple[nn.Module, DataLoader]:
    return llava_model(), DataLoader(llava_samples(24), collate_fn=collate)


def train_all(plan: str) -> dict[str, ParityResult]:
    """Train both models under a plan, or with "" in plain PyTorch."""
    with Float64Throughout():  # includes backward, where blocks are recomputed
        return {name: train_case(plan, case) if plan else train_plain(case) for name, case in CASES.items()}


def losses_of_script(plans: list[str]) -> dict[str, list[list[float]]]:
    """Train LLaVA in a script, where `run.shard` divides a loader with batches of 5, 5 and 1 samples."""
    found = {}
    case = CASES["llava"]
    for plan in plans:
        run = run_of(plan)
        model = run.parallelize(case.model())
        loader = run.shard(DataLoader(llava_samples(11), batch_size=5, shuffle=True, collate_fn=case.collate))
        step = run.train_step(model, torch.optim.AdamW, case.loss, forward=case.forward, lr=3e-3, max_grad_norm=0.5)
        with Float64Throughout():
            metrics = [step(batch) for batch in loader]
        found[plan] = [[one.loss, one.grad_norm] for one in metrics]
    return found
