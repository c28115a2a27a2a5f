from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.model_spec import LayerSpec, ModelSpec
from weft.errors import ModelError
from weft.models.experts import Experts
from weft.models.inspect.describe import describe
from weft.models.registry import build_decoder


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_transformers_model_is_described_by_its_paths():
    transformers = pytest.importorskip("transformers")

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=2,
            num_key_value_heads=1,
        ))  # fmt: skip
    spec = describe(model)
    block = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24 + 2 * 16
    assert spec.name == "LlamaForCausalLM"
    assert spec.layers == (
        LayerSpec("model.embed_tokens", 800),
        LayerSpec("model.layers.*", block, 5),
        LayerSpec("model.norm", 16),
        LayerSpec("lm_head", 800),
    )
    assert spec.shape is None
    assert spec.num_params == count(model)


def test_tied_embedding_is_counted_once():
    transformers = pytest.importorskip("transformers")

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    )
    paths = [layer.path for layer in describe(model).layers]
    assert paths == ["transformer.wte", "transformer.wpe", "transformer.h.*", "transformer.ln_f"]
    assert describe(model).num_params == count(model)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 6), st.integers(2, 5), st.integers(1, 2), st.integers(0, 5), st.integers(0, 2), st.integers(0, 5),
    st.integers(1, 4), st.sampled_from(["bias", "aux_loss"]),
)  # fmt: skip
def test_description_of_expert_models_matches_the_formula(layers, experts, top_k, width, shared, first, every, balance):
    spec = DecoderSpec(
        vocab_size=7, dim=4, num_layers=layers, num_heads=2, num_kv_heads=2, ffn_dim=3, max_seq_len=5,
        num_experts=experts, top_k=top_k, expert_ffn_dim=width, num_shared_experts=shared, balance=balance,
        first_moe_layer=min(first, layers - 1), moe_every=every,
    )  # fmt: skip
    model = build_decoder(spec, device="meta")
    assert describe(model) == ModelSpec.of_decoder(spec)
    assert describe(model).num_params == count(model)
    idle = sum(experts.gate_up[top_k:].numel() + experts.down[top_k:].numel() for experts in stacked(model))
    assert ModelSpec.of_decoder(spec).num_active_params == count(model) - idle


def stacked(model):
    return [module for module in model.modules() if isinstance(module, Experts)]


def test_different_children_are_described_separately():
    dense, wide = (lambda: nn.Linear(4, 4)), (lambda: nn.Linear(4, 9))
    module = nn.Module()
    module.blocks = nn.ModuleList([dense(), dense(), wide(), dense(), nn.ReLU(), wide(), nn.Embedding(4, 4)])
    assert describe(module).layers == (
        LayerSpec("blocks.{0-1,3}", 20, 3),
        LayerSpec("blocks.{2,5}", 45, 2),
        LayerSpec("blocks.6", 16),
    )


def test_equal_shapes_of_other_class_or_dtype_are_separate():
    class Other(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(2, 2), Other(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    assert [layer.path for layer in describe(module).layers] == ["0", "1", "2"]


def test_blocks_are_found_at_any_depth_and_container():
    inner = nn.Sequential(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3)))
    outer = nn.ModuleDict({"x": nn.Sequential(inner), "y": nn.Linear(2, 2)})
    module = nn.Module()
    module.trunk = outer
    module.token = nn.Parameter(torch.zeros(7))
    assert describe(module).layers == (
        LayerSpec("token", 7),
        LayerSpec("trunk.x.0.*", 12, 2),
        LayerSpec("trunk.y", 6),
    )


def test_weights_shared_between_blocks_are_counted_once():
    first, second, third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = third.weight = first.weight
    module = nn.Sequential(first, second, third)
    assert describe(module).layers == (LayerSpec("0", 20), LayerSpec("{1-2}", 4, 2))
    assert describe(nn.Sequential(first, first, first)).layers == (LayerSpec("*", 20),)


def test_frozen_parameters_are_counted_and_buffers_are_not():
    module = nn.BatchNorm1d(6)
    module.weight.requires_grad_(False)
    assert describe(module).num_params == 12


def test_modules_without_parameters_have_no_layers():
    assert describe(nn.Sequential(nn.ReLU(), nn.Dropout())) == ModelSpec(name="Sequential", layers=())


def test_lazy_module_is_rejected():
    with pytest.raises(ModelError, match=r"^parameter 0.weight: a lazy module has no shape yet. Run the model once"):
        describe(nn.Sequential(nn.LazyLinear(4)))


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["llama", "gpt2"]), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3),
    st.integers(1, 9), st.booleans(),
)  # fmt: skip
def test_description_matches_the_formula_for_any_shape(family, vocab, layers, kv_heads, group, ffn_dim, tied):
    spec = DecoderSpec(
        family=family, vocab_size=vocab, dim=4 * kv_heads * group, num_layers=layers, num_heads=kv_heads * group,
        num_kv_heads=kv_heads, ffn_dim=ffn_dim, max_seq_len=5, tied=tied,
    )  # fmt: skip
    model = build_decoder(spec, device="meta")
    assert describe(model) == ModelSpec.of_decoder(spec)
    assert describe(model).num_params == count(model)
