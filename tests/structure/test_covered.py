"""Layouts by hand that leave out, or call whole, what works on a part of the features: wrong gradients, refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.tensor_cases import LLAMA
from weft.config.layout import Layout
from weft.errors import LayoutError
from weft.models.inspect.find_layout import expect_parts_named, find_layout, says_too_little
from weft.models.registry import build_decoder

CUT = "embed=vocab blocks.*.{q,k,v}=colwise blocks.*.out=rowwise"


class Block(nn.Module):
    """Attention with norms before it and on its heads, all in one module. numbers: ask for a value, as no trace may."""

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


def refusal(model: nn.Module, layout: str) -> str:
    with pytest.raises(LayoutError) as caught:
        expect_parts_named(model, Layout.parse(layout))
    return str(caught.value)


def test_norms_of_heads_that_are_left_out_are_named_with_the_styles_to_add():
    said = refusal(Model(), CUT)
    assert said.startswith(
        "layout: blocks.0.q_norm works on features of blocks.0.q, which the layout shards, and the layout leaves it "
        "out, and so do blocks.0.k_norm"
    )
    added = said.partition("Each rank's gradient would be partial. Add ")[2].rstrip(".")
    expect_parts_named(Model(), Layout.parse(f"{CUT} {added}"))


def test_a_norm_of_heads_that_is_called_whole_is_refused():
    said = refusal(Model(), f"{CUT} blocks.*.q_norm=replicate blocks.*.k_norm=partial")
    assert "blocks.0.q_norm works on features of blocks.0.q, which the layout shards, and the layout calls it" in said
    assert said.endswith("blocks.1.q_norm=partial instead of replicate.")


def test_norms_deeper_inside_are_found():
    assert "blocks.0.norms.q works on features of blocks.0.q" in refusal(Model(nested=True), CUT)
    expect_parts_named(Model(nested=True), Layout.parse(f"{CUT} blocks.*.norms=partial"))


def test_norms_before_the_cut_layers_need_no_word():
    expect_parts_named(Model(), Layout.parse(f"{CUT} blocks.*.{{q_norm,k_norm}}=partial"))
    expect_parts_named(build_decoder(LLAMA, device="meta"), Layout.named("llama"))


def test_a_model_that_cannot_be_traced_has_to_say_it_of_each_module_beside_cut_layers():
    model = Model(numbers=True).to("meta")
    said = refusal(model, CUT)
    assert "the model cannot be traced to find their inputs (Model cannot be traced" in said
    added = said.partition("or add ")[2].partition(" to the layout")[0]
    assert {"blocks.0.before=replicate", "blocks.0.q_norm=replicate"} <= set(added.split())
    expect_parts_named(model, Layout.parse(f"{CUT} blocks.*.before=replicate blocks.*.{{q_norm,k_norm}}=partial"))


def test_a_model_that_asks_for_numbers_is_traced_with_numbers():
    assert "blocks.0.q_norm works on features of blocks.0.q" in refusal(Model(numbers=True), CUT)


def test_a_published_plan_that_leaves_out_nested_norms_says_too_little():
    modules = dict(Model(nested=True).named_modules())
    assert says_too_little(Layout.parse(CUT), modules)
    assert not says_too_little(Layout.parse(f"{CUT} blocks.*.norms=partial blocks.*.before=replicate"), modules)


def test_what_tracing_finds_passes_its_own_check():
    for model in (Model(), Model(nested=True)):
        expect_parts_named(model, find_layout(model))
