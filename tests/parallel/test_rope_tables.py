"""Rotary tables by row length: a row has the same logits alone and padded in a batch."""

from __future__ import annotations

import pytest
import torch

from weft.errors import ModelError
from weft.parallel.layers.rope_tables import track_row_lengths

SHORT, LONG = 6, 16


def phi3(limit=8):
    from transformers import Phi3Config, Phi3ForCausalLM

    tables = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0], "original_max_position_embeddings": limit}
    config = Phi3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, original_max_position_embeddings=limit,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, **tables},
    )  # fmt: skip
    return with_row_lengths(Phi3ForCausalLM(config))


def with_row_lengths(model, cp=1):
    torch.manual_seed(0)
    model = model.double()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.3)
    track_row_lengths(model, cp)
    return model


def rows():
    ids = torch.randint(1, 32, (2, LONG), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[0, SHORT:] = mask[0, SHORT:] = 0
    return ids, mask


def test_short_row_has_equal_logits_unpadded_and_padded():
    model, (ids, mask) = phi3(), rows()
    batched = model(input_ids=ids, attention_mask=mask).logits
    single = model(input_ids=ids[:1, :SHORT], attention_mask=mask[:1, :SHORT]).logits
    torch.testing.assert_close(batched[:1, :SHORT], single, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(batched[1:], model(input_ids=ids[1:]).logits, rtol=1e-10, atol=1e-10)


def test_each_packed_document_has_its_own_rope_table():
    model, (ids, _) = phi3(), rows()
    packed = torch.cat((ids[:1, :SHORT], ids[1:]), 1)
    positions = torch.cat((torch.arange(SHORT), torch.arange(LONG)))[None]
    found = model(input_ids=packed, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found[:, :SHORT], model(input_ids=ids[:1, :SHORT]).logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[:, SHORT:], model(input_ids=ids[1:]).logits, rtol=1e-10, atol=1e-10)


def test_dynamic_rope_tables_are_rejected_above_the_limit():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=8, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )  # fmt: skip
    model, (ids, mask) = with_row_lengths(LlamaForCausalLM(config)), rows()
    model(input_ids=ids[:, :8], attention_mask=mask[:, :8])
    with pytest.raises(ModelError, match=r"rope_type=dynamic: a sequence of 16 tokens is longer than 8"):
        model(input_ids=ids, attention_mask=mask)
