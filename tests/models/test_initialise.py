from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from weft.errors import ModelError
from weft.models.initialize import initialise, normal_values
from weft.models.initialize import initialise as _function
from weft.models.registry import build_decoder


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal_weights(left, right):
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def test_materialized_meta_model_equals_direct_build(spec):
    direct = build_decoder(spec, seed=11)
    later = build_decoder(spec, device="meta")
    later.to_empty(device="cpu")
    initialise(later, 11)
    assert_equal_weights(weights(direct), weights(later))


def test_global_generator_is_neither_used_nor_changed(spec):
    torch.manual_seed(1)
    first = weights(build_decoder(spec, seed=3))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = weights(build_decoder(spec, seed=3))
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal_weights(first, second)


def test_submodule_gets_the_weights_of_the_full_model(spec):
    whole = build_decoder(spec, seed=5)
    part = copy.deepcopy(build_decoder(spec, seed=99)).blocks[2]
    initialise(part, 5, prefix="blocks.2.")
    assert_equal_weights(weights(part), weights(whole.blocks[2]))


def test_order_of_parameters_does_not_matter(spec):
    ordered, turned = build_decoder(spec, seed=5), build_decoder(spec, seed=6)
    turned._modules = dict(reversed(turned._modules.items()))
    initialise(turned, 5)
    assert dict(ordered.named_parameters()).keys() == dict(turned.named_parameters()).keys()
    assert list(weights(ordered)) != list(weights(turned))
    for name, value in weights(turned).items():
        assert torch.equal(value, ordered.get_parameter(name)), name


def test_other_seed_or_name_gives_other_weights(spec):
    one, two = build_decoder(spec, seed=1), build_decoder(spec, seed=2)
    assert not torch.equal(one.embed.weight, two.embed.weight)
    assert not torch.equal(one.blocks[0].attn.q.weight, one.blocks[1].attn.q.weight)
    assert not torch.equal(one.blocks[0].attn.q.weight, one.blocks[0].attn.o.weight * math.sqrt(6))


def test_every_dtype_has_the_same_values_rounded(spec):
    double, half = build_decoder(spec, dtype=torch.float64), build_decoder(spec, dtype=torch.bfloat16)
    for name, value in build_decoder(spec).named_parameters():
        assert torch.equal(double.get_parameter(name), value.double()), name
        assert torch.equal(half.get_parameter(name), value.bfloat16()), name


def test_initial_mean_and_standard_deviation(make_spec):
    model = build_decoder(make_spec("gpt2", dim=128, ffn_dim=256, num_layers=8))
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            assert torch.count_nonzero(value) == 0, name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith(("attn.o.weight", "mlp.down.weight")) else 0.02
            assert value.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(value.mean().item()) < 0.1 * std, name


def test_tied_weights_are_initialized_once_under_the_first_name(make_spec):
    tied, untied = build_decoder(make_spec(tied=True), seed=4), build_decoder(make_spec(tied=False), seed=4)
    assert torch.equal(tied.head.weight, untied.embed.weight)
    assert not torch.equal(untied.head.weight, untied.embed.weight)


def test_blocks_of_a_large_parameter_are_generated_independently(monkeypatch):
    import importlib

    monkeypatch.setattr(importlib.import_module("weft.models.initialize"), "_BLOCK", 10)
    blocks = dict(normal_values(3, "embed.weight", 35))
    assert list(blocks) == [0, 10, 20, 30]
    assert [values.numel() for values in blocks.values()] == [10, 10, 10, 5]
    assert not torch.equal(blocks[0], blocks[10])
    linear = nn.Linear(5, 7, bias=False)
    _function(linear, 3, prefix="embed.")
    torch.testing.assert_close(linear.weight.flatten(), torch.cat(list(blocks.values())) * 0.02)


def test_values_of_a_seed_never_change():
    """A change here changes every newly initialized model, so it requires a release note."""
    [(_, values)] = normal_values(0, "embed.weight", 4)
    torch.testing.assert_close(values, torch.tensor(PINNED), rtol=0, atol=0)


PINNED = [1.5282918214797974, 0.18147429823875427, -0.058709412813186646, 1.760359525680542]


def test_meta_parameter_is_rejected(spec):
    with pytest.raises(ModelError, match=r"^parameter embed.weight: it is on the meta device. Call to_empty\(device="):
        initialise(build_decoder(spec, device="meta"), 0)


def test_vector_without_a_rule_is_rejected():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(3))

    with pytest.raises(
        ModelError,
        match=r"^parameter gain: Weft has no rule for the initial values of a vector of Scale. Fill it",
    ):
        initialise(Scale(), 0)
