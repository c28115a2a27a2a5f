"""User layouts that omit, or mark as replicated, modules on sharded features are rejected: gradients would be wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.tensor_cases import LLAMA
from weft.config.fields.layout import Layout
from weft.errors import LayoutError
from weft.models.inspect.find_layout import expect_parts_named, find_layout, says_too_little
from weft.models.registry import build_decoder

SHARDED = "embed=vocab blocks.*.{q,k,v}=colwise blocks.*.out=rowwise"


class Block(nn.Module):
    """Attention with norms before it and on its heads, in one module. numbers: read a value, which cannot be traced."""

    def __init__(self, numbers: bool = False, nested: bool = False):
        super().__init__()
        self.before = nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        norms = nn.ModuleDict({"q": nn.RMSNorm(4), "k": nn.RMSNorm(4)})
        self.norms = norms if nested else None
        self.q_norm, self.k_norm = (None, None) if nested else norms.values()
        self.out = nn.Linear(16, 16)
        self.numbers = numbers

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if self.numbers and x_BTD.sum().item() > 1e9:
            return x_BTD
        q_norm, k_norm = (self.q_norm, self.k_norm) if self.norms is None else self.norms.values()
        h_BTD = self.before(x_BTD)
        q, k, v = (each(h_BTD).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q_norm(q), k_norm(k), v)
        return x_BTD + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, **kinds: bool):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList([Block(**kinds), Block(**kinds)])
        self.norm = nn.LayerNorm(16)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids_BT)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def error_of(model: nn.Module, layout: str) -> str:
    with pytest.raises(LayoutError) as caught:
        expect_parts_named(model, Layout.parse(layout))
    return str(caught.value)


def test_omitted_head_norms_are_named_with_the_styles_to_add():
    message = error_of(Model(), SHARDED)
    assert message.startswith(
        "layout: blocks.0.q_norm works on features of blocks.0.q, which the layout shards, and the layout leaves it "
        "out, and so do blocks.0.k_norm"
    )
    added = message.partition("Each rank's gradient would be partial. Add ")[2].rstrip(".")
    expect_parts_named(Model(), Layout.parse(f"{SHARDED} {added}"))


def test_replicated_style_of_a_head_norm_is_rejected():
    message = error_of(Model(), f"{SHARDED} blocks.*.q_norm=replicate blocks.*.k_norm=partial")
    assert (
        "blocks.0.q_norm works on features of blocks.0.q, which the layout shards, and the layout calls it" in message
    )
    assert message.endswith("blocks.1.q_norm=partial instead of replicate.")


def test_nested_head_norms_are_found():
    assert "blocks.0.norms.q works on features of blocks.0.q" in error_of(Model(nested=True), SHARDED)
    expect_parts_named(Model(nested=True), Layout.parse(f"{SHARDED} blocks.*.norms=partial"))


def test_norms_before_sharded_layers_need_no_style():
    expect_parts_named(Model(), Layout.parse(f"{SHARDED} blocks.*.{{q_norm,k_norm}}=partial"))
    expect_parts_named(build_decoder(LLAMA, device="meta"), Layout.named("llama"))


def test_untraceable_model_needs_a_style_for_each_nearby_module():
    model = Model(numbers=True).to("meta")
    message = error_of(model, SHARDED)
    assert "the model cannot be traced to find their inputs (Model cannot be traced" in message
    added = message.partition("or add ")[2].partition(" to the layout")[0]
    assert {"blocks.0.before=replicate", "blocks.0.q_norm=replicate"} <= set(added.split())
    expect_parts_named(model, Layout.parse(f"{SHARDED} blocks.*.before=replicate blocks.*.{{q_norm,k_norm}}=partial"))


def test_model_that_reads_values_is_traced_with_values():
    assert "blocks.0.q_norm works on features of blocks.0.q" in error_of(Model(numbers=True), SHARDED)


def test_published_plan_without_nested_norms_is_incomplete():
    modules = dict(Model(nested=True).named_modules())
    assert says_too_little(Layout.parse(SHARDED), modules)
    assert not says_too_little(Layout.parse(f"{SHARDED} blocks.*.norms=partial blocks.*.before=replicate"), modules)


def test_traced_layout_passes_the_check():
    for model in (Model(), Model(nested=True)):
        expect_parts_named(model, find_layout(model))
