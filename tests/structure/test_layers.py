"""Module inspection: layers, heads, experts, token mixing, and sizes in a Hugging Face config."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from weft.config.fields.layout import Layout
from weft.config.shapes.decoder_shape import DecoderSpec
from weft.config.shapes.hugging_face_config import decoder_shape, image_shape, number, read_numbers
from weft.errors import ModelError
from weft.models.inspect import dry_run, hugging_face, layers, token_flow
from weft.models.inspect.dry_run import call_function
from weft.models.inspect.find_layout import explain_layout, find_layout
from weft.models.inspect.layers import Heads
from weft.models.registry import build_decoder

SPEC = DecoderSpec(vocab_size=32, dim=16, num_layers=1, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=64)


class HasLayout(nn.Module):
    """A user's model that defines its own layout."""

    family, has_routers = "mine", True

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def tensor_layout(self):
        return Layout.parse("up=colwise down=rowwise")


def test_layout_defined_by_a_model_is_used():
    found = explain_layout(HasLayout())
    assert (found.layout, found.source, found.reasons) == (
        find_layout(HasLayout()),
        "the project's own layout of mine",
        {},
    )
    assert not isinstance(nn.Linear(2, 2), layers.KnownModel)


def test_decoders_define_layout_head_and_max_length():
    model = build_decoder(SPEC, device="meta")
    assert isinstance(model, layers.KnownModel)
    assert find_layout(model) == Layout.named("llama")
    assert layers.find_lm_head(model) is model.head
    assert hugging_face.longest_sequence(model) == 64
    assert not hugging_face.is_hugging_face(model)


def test_embedding_tables_are_distinguished_from_matrices():
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4))
    assert layers.table_params(model) == {model[0].weight}


def test_experts_are_found_by_attribute_or_layout():
    stack, named = nn.Module(), nn.Module()
    stack.stacks_experts = True
    stack.up = named.up = nn.Parameter(torch.zeros(3, 2, 2))
    model = nn.ModuleDict({"stack": stack, "named": named})
    assert [path for path, _ in layers.find_experts(model)] == ["stack"]
    assert [path for path, _ in layers.find_experts(model, Layout.parse("named=expert"))] == ["stack", "named"]
    assert layers.num_experts("stack", stack) == 3
    with pytest.raises(ModelError, match="Stack the experts"):
        layers.num_experts("", nn.Linear(2, 2))


@pytest.mark.parametrize(("kind", "expected"), [
    ("LlamaAttention", "attention"), ("MambaMixer", "other"), ("GPTNeoXMLP", ""), ("RwkvLayerNorm", ""),
    ("Conv1D", "convolution"),
])  # fmt: skip
def test_token_mixing_by_class_name(kind, expected):
    module = type(kind, (nn.Linear,), {})(2, 2)
    assert token_flow.mixing(module) == expected


def test_token_mixing_of_torch_modules():
    assert token_flow.mixing(nn.GRU(2, 2)) == "other"
    assert token_flow.mixing(nn.Conv1d(2, 2, 3)) == "other"
    assert token_flow.mixing(nn.Conv2d(2, 2, 3)) == "convolution"
    assert token_flow.mixing(type("Attention", (nn.Module,), {})()) == ""  # has no weights


def test_head_counts_per_rank():
    module = nn.Linear(2, 2)
    module.head_dim, module.num_heads, module.num_key_value_heads = 8, 8, 2
    assert Heads.of(module) == Heads(8, 2, 8)
    assert [(full, local) for _, full, local in Heads.of(module).numbers(4)] == [(8, 2), (2, 1), (4, 2), (64, 16)]


CONFIG = {"vocab_size": 50, "n_embd": 12, "n_layer": 3, "n_head": 4, "n_inner": None, "n_positions": 99}


def test_sizes_of_a_config_are_read_by_alias():
    assert read_numbers("x", CONFIG) == {"vocab": 50, "hidden": 12, "layers": 3, "heads": 4, "positions": 99}
    shape = decoder_shape(SimpleNamespace(**CONFIG))
    assert shape is not None
    assert (shape.dim, shape.num_kv_heads, shape.ffn_dim, shape.max_seq_len) == (12, 4, 48, 99)
    assert decoder_shape(SimpleNamespace(vocab_size=5)) is None
    assert number(SimpleNamespace(num_attention_heads=[4, 8]), "heads") is None
    assert number(None, "heads") is None


def test_image_shape_of_a_config():
    assert image_shape(SimpleNamespace(image_size=8, num_channels=1)) == (1, 8, 8)
    assert image_shape(SimpleNamespace(vision_config=SimpleNamespace(image_size=[4, 6], num_channels=3))) == (3, 4, 6)
    assert image_shape(SimpleNamespace()) is None


def test_function_that_returns_no_model_is_rejected():
    with pytest.raises(ModelError, match=r"it returned dict, not an nn\.Module"):
        call_function("builtins:dict")


def test_unreadable_config_raises_one_sentence(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{")
    for source in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ModelError, match=r"transformers cannot read its config\.json .* Check the file"):
            hugging_face.load_model_config(source)


def test_example_inputs_adapt_to_batch_and_sequence():
    inputs = dry_run.Inputs(HasLayout(), {"input_ids": torch.zeros(3, 5, dtype=torch.int64), "rate": torch.tensor(1.0)})
    shapes = []
    inputs.call(lambda **given: shapes.append({name: tuple(each.shape) for name, each in given.items()}), 7, 9)
    assert shapes == [{"input_ids": (7, 9), "rate": ()}]
    assert inputs.sequence_step(HasLayout()) == dry_run.SHORTEST
