"""Distributed encoders: item boundaries, assignment to ranks, rejected models, and attention over all images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.parity import encoder_cases, vision_cases
from weft.comm.mesh import build_mesh
from weft.config.fields.layout import Layout
from weft.config.plan import Plan
from weft.errors import LayoutError
from weft.models.attention import bordered_attention
from weft.parallel.layers.distributed_encoders import assign_items, choose_encoders
from weft.parallel.layers.encoder_items import attend_by_borders, encode_calls, find_items, parse_calls
from weft.parallel.parallelize import parallelize

GRIDS = torch.tensor([[1, 2, 2], [2, 2, 4]])


def test_rows_are_items_without_boundaries():
    items = find_items("tower", (torch.zeros(3, 3, 8, 8),), {"mask": torch.ones(3, 4), "scale": torch.ones(2)})
    assert items.rows == items.spans == (1, 1, 1)
    args, kwargs = items.arguments({index: items.taken(index, [2, 0]) for index in (*items.by_row, *items.by_item)})
    assert (args[0].shape[0], kwargs["mask"].shape[0], kwargs["scale"].shape[0]) == (2, 2, 2)


def test_grids_and_counts_give_item_boundaries():
    patches = torch.arange(20.0)[:, None].expand(20, 6)
    items = find_items("tower", (patches,), {"grid_thw": GRIDS})
    assert (items.rows, items.spans) == ((4, 16), (4, 8))
    assert items.taken(0, [1])[:, 0].tolist() == list(range(4, 20))
    assert items.taken(1, [1]).tolist() == [[2, 2, 4]]
    assert find_items("tower", (patches, torch.tensor([5, 0, 15])), {}).rows == (5, 0, 15)


@pytest.mark.parametrize("args, message", [
    ((torch.zeros(20, 6),), r"tower=spread: of its input of shape \(20, 6\) the rows of each item are unknown"),
    ((torch.zeros(20, dtype=torch.long),), "called without a floating-point tensor"),
])  # fmt: skip
def test_unknown_item_boundaries_are_rejected(args, message):
    with pytest.raises(LayoutError, match=message):
        find_items("tower", args, {})


def test_items_are_assigned_by_cost_to_the_least_loaded_rank():
    assigned = assign_items([5.0, 1.0, 1.0, 4.0, 3.0, 1.0], [0, 0, 0, 1, 1, 1], 2, 1)
    assert sorted(item for own in assigned for item in own) == list(range(6))
    sums = [sum([5.0, 1.0, 1.0, 4.0, 3.0, 1.0][item] for item in own) for own in assigned]
    assert max(sums) == 8.0
    # Among equally loaded ranks, the item's own rank is preferred, so a balanced load moves nothing.
    assert assign_items([1.0] * 4, [0, 0, 1, 1], 2, 1) == [[0, 1], [2, 3]]
    assert assign_items([], [], 2, 1) == [[], []]


def test_encoder_call_is_encoded_for_other_ranks():
    inner = find_items("tower", (torch.ones(20, 6),), {"grid_thw": GRIDS})
    outer = find_items("tower", (), {"pixel_values": torch.ones(20, 6), "image_grid_thw": GRIDS, "return_dict": True})
    found = parse_calls(encode_calls("tower", "get_image_features", outer, inner, 0), torch.device("cpu"))
    args, kwargs = found.outer.arguments({})
    assert (found.method, args, kwargs["return_dict"]) == ("get_image_features", (), True)
    assert kwargs["pixel_values"].shape == (4, 6)
    assert not kwargs["pixel_values"].any()
    assert kwargs["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert found.inner.rows == (4,)
    with pytest.raises(LayoutError, match="called with a dtype"):
        encode_calls("tower", "", find_items("tower", (torch.zeros(1, 2, 2), torch.float32), {}), inner, 0)


class Normed(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.tower = inner
        self.head = nn.Linear(3, 3)


@pytest.mark.parametrize("make, layout, plan, message", [
    (lambda: Normed(nn.BatchNorm2d(3)), "tower=spread", "", "tower=spread: tower uses statistics over items"),
    (lambda: Normed(nn.Dropout(0.5)), "tower=spread", "", "tower=spread: tower drops at a rate of 0.5"),
    (lambda: Normed(nn.Linear(3, 3)), "towers=spread", "", "layout pattern 'towers': the model has no such module"),
    (lambda: Normed(nn.Linear(3, 3)), "tower=spread", "cp=2", "tower=spread: with cp=2 each rank has a part"),
    (
        encoder_cases.whisper_model, "model.encoder=spread", "pp=2 microbatches=2",
        "model.encoder=spread: with pp=2 its blocks are divided into stages",
    ),
])  # fmt: skip
def test_undistributable_encoders_are_rejected(make, layout, plan, message):
    mesh = type("Laid", (), {"plan": Plan.parse(plan)})()
    with pytest.raises(LayoutError) as caught:
        choose_encoders(make(), mesh, Layout.parse(layout))
    assert str(caught.value).startswith(message)


def test_spread_style_round_trips():
    layout = Layout.parse("model.visual=spread:data lm_head=vocab")
    assert Layout.parse(layout.format()) == layout
    assert layout.divided_modules(["model.visual", "lm_head"]) == {"model.visual": True}
    assert layout.without_distributed.format() == "lm_head=vocab"
    with pytest.raises(LayoutError, match="spread:all"):
        Layout.parse("model.visual=spread:all")


def test_spread_style_changes_nothing_in_one_process():
    case, path = encoder_cases.CASES["llava"]
    batch = case.collate(case.samples(0))
    model = case.model()
    expected = case.forward(model, batch)
    laid = parallelize(model, build_mesh(Plan.parse("precision=fp64")), layout=Layout.parse(f"{path}=spread:data"))
    assert torch.equal(case.forward(laid, batch), expected)


@pytest.mark.parametrize("lengths", [(4, 4, 4), (5, 5, 2, 7), (6,)])
def test_attention_within_boundaries_matches_separate_calls(lengths):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, sum(lengths), 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    expected = torch.cat([nn.functional.scaled_dot_product_attention(*part) for part in parts], 2)
    starts = torch.tensor([[sum(lengths[:index]) for index in range(len(lengths))]])
    found = bordered_attention(q, k, v, starts, max(lengths))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    for one, other in zip(*(torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_qwen2_vl_attends_to_all_images_in_one_call(monkeypatch):
    model, other = vision_cases.qwen2_vl_model().double(), vision_cases.qwen2_vl_model().double()
    attend_by_borders(model)
    assert model.config.vision_config._attn_implementation == "sdpa"  # the saved config is unchanged
    calls = []
    attend = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or attend(*a, **k)
    )
    pixels = torch.randn(20, 3 * vision_cases.PATCH**2, dtype=torch.float64)
    grids = torch.tensor([[1, 2, 2], [1, 2, 4], [1, 4, 2]])
    found = model.model.visual(pixels, grid_thw=grids).pooler_output
    assert not calls
    torch.testing.assert_close(found, other.model.visual(pixels, grid_thw=grids).pooler_output, rtol=1e-12, atol=1e-14)
    assert len(calls) == 3 * vision_cases.LAYERS
