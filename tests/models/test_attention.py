"""B sequences, T query tokens, S key tokens."""

from __future__ import annotations

import pytest
import torch

from weft.models.attention import see_causally
from weft.models.registry import build_decoder


@pytest.mark.parametrize(("num_seen", "num_new"), [(0, 5), (0, 1), (7, 1)])
def test_no_mask_is_created_if_unneeded(num_seen, num_new):
    positions_BT = torch.arange(num_seen, num_seen + num_new)[None]
    assert see_causally(positions_BT, None, num_seen, torch.float32).mask_B1TS is None


def test_tokens_after_a_cache_attend_to_cache_and_earlier_tokens():
    mask_B1TS = see_causally(torch.arange(2, 5)[None], None, 2, torch.float64).mask_B1TS
    assert mask_B1TS.dtype == torch.float64
    assert (mask_B1TS == 0).int().tolist() == [[[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]]]
    assert set(mask_B1TS.unique().tolist()) == {0.0, float("-inf")}


def test_document_mask_is_created_once_in_the_dtype_of_attention(make_spec):
    model, seen = build_decoder(make_spec()), []
    for block in model.blocks:
        block.attn.core.takes_mask = True  # like a custom core without this attribute
        block.attn.register_forward_pre_hook(lambda _, args: seen.append(args[1].mask_B1TS))
    ids_BT = torch.arange(4).expand(2, 4) // 2
    with torch.autocast("cpu", torch.bfloat16):
        model(ids_BT, document_ids_BT=ids_BT)
    assert all(mask is seen[0] for mask in seen)
    assert seen[0].dtype == torch.bfloat16
    model(ids_BT, document_ids_BT=ids_BT)
    assert seen[-1].dtype == torch.float32
