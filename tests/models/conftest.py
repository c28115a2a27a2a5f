from __future__ import annotations

import pytest
import torch

from weft.config.shapes.decoder_shape import DecoderSpec


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_spec(family: str = "llama", **changes: object) -> DecoderSpec:
    shape = {
        "family": family, "vocab_size": 61, "dim": 32, "num_layers": 3, "num_heads": 4,
        "num_kv_heads": 4 if family == "gpt2" else 2, "ffn_dim": 48, "max_seq_len": 40,
    }  # fmt: skip
    return DecoderSpec(**{**shape, **changes})


@pytest.fixture(params=["llama", "gpt2"])
def spec(request) -> DecoderSpec:
    return small_spec(request.param)


@pytest.fixture
def make_spec():
    return small_spec
