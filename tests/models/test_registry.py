from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weft.config.shapes.model_spec import ModelSpec, decoder_spec, model_names
from weft.errors import ModelError
from weft.models.inspect.describe import describe
from weft.models.registry import build_decoder


@pytest.mark.parametrize("name", model_names())
def test_named_size_has_equal_parameter_count_by_formula_and_built(name):
    model = build_decoder(decoder_spec(name), device="meta")
    assert describe(model).layers == ModelSpec.named(name).layers
    assert describe(model).shape == decoder_spec(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == ModelSpec.named(name).num_params


def test_default_is_float32_on_cpu_for_any_torch_default():
    torch.set_default_dtype(torch.float64)
    try:
        model = build_decoder(replace(decoder_spec("tiny"), num_layers=1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {(parameter.dtype, parameter.device.type) for parameter in model.parameters()} == {(torch.float32, "cpu")}


def test_invalid_shape_is_rejected_with_all_broken_rules():
    with pytest.raises(ModelError) as caught:
        build_decoder(replace(decoder_spec("tiny"), num_heads=5, norm_eps=0.0))
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == [
        "model.num_heads", "model.num_kv_heads", "model.norm_eps"
    ]  # fmt: skip
