"""Models whose encoder inputs are distributed over ranks: samples with zero to three images, and a batch of text only.

B samples, T tokens, P patches of all samples, D width.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.parity import vision_cases as vision
from tests.parity.dropout_cases import Block
from weft.config.fields.layout import Layout
from weft.verify.parity import ParityResult, SampleCase, train_case, train_plain
from weft.verify.verifier import Float64Throughout

#: Images of each sample. With five samples per step, the second step has no image.
NUM_IMAGES = (0, 3, 0, 0, 1) + (0,) * 5 + (2, 0, 1, 0, 0)
IGNORE, VOCAB, DIM, PATCH = vision.IGNORE, 29, 16, 6


def _text(rng: torch.Generator, index: int, tokens: list[int]) -> vision.Sample:
    """Return each image's tokens followed by a text token, then two to five text tokens. Every fourth has no label."""
    text_ids = torch.randint(3, vision.VOCAB - 2, (2 + index % 4 + len(tokens),), generator=rng)
    parts = [
        part
        for each, count in enumerate(tokens)
        for part in (torch.full((count,), vision.IMAGE), text_ids[each : each + 1])
    ]
    ids = torch.cat([*parts, text_ids[len(tokens) :]])
    labels = torch.where((ids == vision.IMAGE) | (index % 4 == 2), IGNORE, ids).roll(-1)
    return {"input_ids": ids, "labels": labels}


def llava_samples(count: int) -> list[vision.Sample]:
    rng, found = torch.Generator().manual_seed(7), []
    for index in range(count):
        images = torch.randn(NUM_IMAGES[index], 3, vision.SIDE, vision.SIDE, generator=rng)
        found.append({**_text(rng, index, [4] * len(images)), "pixel_values": images})
    return found


def qwen2_vl_samples(count: int) -> list[vision.Sample]:
    """Return samples with images of 4 to 16 patches. Four patches are one token."""
    rng, found = torch.Generator().manual_seed(7), []
    for index in range(count):
        grids = torch.tensor([[1, 2, 2 + 2 * ((index + each) % 4)] for each in range(NUM_IMAGES[index])]).view(-1, 3)
        patches = torch.randn(int(grids.prod(-1).sum()), 3 * vision.PATCH**2, generator=rng)
        tokens: list[int] = (grids.prod(-1) // 4).long().tolist()
        sample = {**_text(rng, index, tokens), "pixel_values": patches, "image_grid_thw": grids.long()}
        found.append({**sample, "mm_token_type_ids": (sample["input_ids"] == vision.IMAGE).long()})
    return found


class Tower(nn.Module):
    """Mixes each image's patches, (P, PATCH) to (P, D)."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(PATCH, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, patches: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        owner = torch.repeat_interleave(torch.arange(len(counts)), counts)
        x = self.into(patches)
        for layer in self.layers:
            mean = x.new_zeros(len(counts), DIM).index_add(0, owner, x) / counts[:, None].clamp(min=1)
            x = x + layer(x + mean[owner]).tanh()
        return x


class UserModel(nn.Module):
    """A user-defined model: a vision tower and text blocks."""

    def __init__(self):
        super().__init__()
        self.token_embed = nn.Embedding(VOCAB, DIM)
        self.tower = Tower()
        self.blocks = nn.ModuleList(Block(DIM, 4, 0.0) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: torch.Tensor, patches: torch.Tensor, grids: torch.Tensor, owner: torch.Tensor) -> Any:
        x = self.token_embed(ids)
        features = self.tower(patches, grids)
        image_owner = torch.repeat_interleave(owner, grids)
        x = x + x.new_zeros(len(ids), DIM).index_add(0, image_owner, features)[:, None]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def own_model() -> nn.Module:
    torch.manual_seed(5)
    return UserModel()


def own_samples(count: int) -> list[vision.Sample]:
    rng, found = torch.Generator().manual_seed(7), []
    for index in range(count):
        counts = torch.tensor([2 + (index + each) % 3 for each in range(NUM_IMAGES[index])], dtype=torch.long)
        ids = torch.randint(VOCAB, (8,), generator=rng)
        patches = torch.randn(int(counts.sum()), PATCH, generator=rng)
        found.append({"ids": ids, "labels": ids.roll(-1), "patches": patches, "grids": counts})
    return found


def whisper_model() -> nn.Module:
    torch.manual_seed(5)
    config = vision.transformers().WhisperConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=8,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    return vision._larger_weights(vision.transformers().WhisperForConditionalGeneration(config))


def whisper_samples(count: int) -> list[vision.Sample]:
    rng, found = torch.Generator().manual_seed(7), []
    for _ in range(count):
        ids = torch.randint(3, VOCAB, (8,), generator=rng)
        clip = torch.randn(8, 16, generator=rng)
        found.append({"input_features": clip, "decoder_input_ids": ids, "labels": ids.roll(-1)})
    return found


@dataclass(frozen=True)
class EncoderCase(SampleCase):
    """One of the models on three batches that do not divide evenly."""

    make: Callable[[], nn.Module]
    data: Callable[[int], list[vision.Sample]]
    layout: Layout | None = None
    num_steps: int = 3
    global_batch: int = 5
    max_grad_norm: float = 0.5

    def model(self) -> nn.Module:
        return self.make().double()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-6)

    def samples(self, step: int) -> list[vision.Sample]:
        return self.data(self.global_batch * (step + 1))[-self.global_batch :]

    def collate(self, samples: list[vision.Sample]) -> vision.Sample:
        if "input_ids" not in samples[0]:
            joined = ("patches", "grids")
            batch = {n: (torch.cat if n in joined else torch.stack)([one[n] for one in samples]) for n in samples[0]}
            if "grids" in batch:
                counts = torch.tensor([len(one["grids"]) for one in samples])
                batch["owner"] = torch.repeat_interleave(torch.arange(len(samples)), counts)
        else:
            batch = vision.collate(samples)
            more = -batch["input_ids"].shape[1] % 8  # sp needs a multiple of its ranks
            batch = {
                n: F.pad(x, (0, more), value=vision.PADDING[n]) if n in vision.PADDING else x for n, x in batch.items()
            }
        return {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}

    def forward(self, model: nn.Module, batch: vision.Sample) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "labels"}
        return model(**given) if isinstance(model, UserModel) else model(**given, use_cache=False).logits

    def loss(self, output: torch.Tensor, batch: vision.Sample) -> tuple[torch.Tensor, torch.Tensor]:
        labels = batch["labels"]
        found = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORE)
        return found, (labels != IGNORE).sum()


CASES = {
    "llava": (EncoderCase(vision.llava_model, llava_samples), "model.vision_tower"),
    "qwen2_vl": (EncoderCase(vision.qwen2_vl_model, qwen2_vl_samples), "model.visual"),
    "own": (EncoderCase(own_model, own_samples), "tower"),
    "whisper": (EncoderCase(whisper_model, whisper_samples), "model.encoder"),
}
#: The tp layout of the user-defined model.
_USER_LAYOUT = "blocks.*.attn.{q,k,v}=colwise blocks.*.attn.o=rowwise blocks.*.mlp.0=colwise blocks.*.mlp.3=rowwise"


def train(plan: str, name: str, style: str) -> ParityResult:
    """Train one model under a plan, or with "" in plain PyTorch. style: the encoder's style, "" for no entry."""
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    case, path = CASES[name]
    entries = f"{path}={style} " if style else ""
    entries += _USER_LAYOUT if name == "own" and "tp=" in plan else ""
    case = EncoderCase(case.make, case.data, Layout.parse(entries) if entries.strip() else None)
    with Float64Throughout():  # includes backward, where blocks are recomputed
        return train_case(f"{plan} precision=fp64", case) if plan else train_plain(case)


def train_all(runs: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], ParityResult]:
    """Train several (plan, model, style) in one call of a pool of ranks."""
    return {run: train(*run) for run in runs}
