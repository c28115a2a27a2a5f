from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.run_config import ModelSection
from weft.config.shapes.decoder_shape import DecoderSpec, shape_problems
from weft.config.shapes.model_spec import LayerSpec, ModelSpec, decoder_spec, model_names, named_sizes, resolve_decoder
from weft.errors import ConfigError, ModelError

TINY = decoder_spec("tiny")

#: Parameter counts of the published weights.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "deepseek-moe-16b": 16_375_728_128,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_sizes_have_their_published_parameter_counts(name):
    assert ModelSpec.named(name).num_params == PUBLISHED[name]


def test_sizes_without_published_counts_are_near_their_names():
    assert ModelSpec.named("gpt3-175b").num_params == pytest.approx(175e9, rel=0.01)
    assert 5.5e6 < ModelSpec.named("tiny").num_params < 6.5e6
    assert 5.5e6 < ModelSpec.named("gpt2-tiny").num_params < 6.5e6


@pytest.mark.parametrize("name", model_names())
def test_named_sizes_satisfy_the_shape_rules(name):
    assert shape_problems(decoder_spec(name)) == ()


def test_size_names_are_unique_and_complete():
    names = model_names()
    assert len(set(names)) == len(names)
    assert set(PUBLISHED) | {"tiny", "small", "gpt2-tiny", "moe-tiny", "gpt3-175b"} == set(names)
    assert [size.name for size in named_sizes() if size.open_vocab] == ["tiny", "gpt2-tiny", "moe-tiny", "small"]


def test_active_parameters_exclude_unrouted_experts():
    """Compare with the papers' counts: 12.9 of 46.7 billion, 39 of 141, 2.8 of 16.4."""
    active = {name: ModelSpec.named(name).num_active_params for name in ("mixtral-8x7b", "mixtral-8x22b")}
    assert active == {"mixtral-8x7b": 12_879_925_248, "mixtral-8x22b": 39_152_031_744}
    assert ModelSpec.named("deepseek-moe-16b").num_active_params == 2_828_650_496
    assert ModelSpec.named("llama3-8b").num_active_params == ModelSpec.named("llama3-8b").num_params


@pytest.mark.parametrize(("first", "every", "paths"), [
    (0, 1, {"blocks.*": 6}), (1, 1, {"blocks.0": 1, "blocks.{1-5}": 5}), (5, 1, {"blocks.{0-4}": 5, "blocks.5": 1}),
    (1, 2, {"blocks.{0,2,4}": 3, "blocks.{1,3,5}": 3}), (3, 9, {"blocks.{0-2,4-5}": 5, "blocks.3": 1}),
])  # fmt: skip
def test_layers_with_experts_are_counted_separately(first, every, paths):
    spec = replace(decoder_spec("moe-tiny"), first_moe_layer=first, moe_every=every)
    layers = [layer for layer in ModelSpec.of_decoder(spec).layers if layer.path.startswith("blocks")]
    assert {layer.path: layer.count for layer in layers} == paths


def test_tied_head_is_counted_once():
    tied, untied = ModelSpec.of_decoder(TINY), ModelSpec.of_decoder(replace(TINY, tied=False))
    assert untied.num_params - tied.num_params == TINY.vocab_size * TINY.dim
    assert [layer.path for layer in untied.layers] == ["embed", "blocks.*", "norm", "head"]
    assert untied.layers[1].count == TINY.num_layers
    assert untied.layers[-1] == LayerSpec("head", TINY.vocab_size * TINY.dim)


def test_unknown_size_raises_with_a_suggestion_or_the_list():
    with pytest.raises(ModelError, match=r"^model.name=lama3-8b: no size has this name. Did you mean 'llama3-8b'\?$"):
        decoder_spec("lama3-8b")
    with pytest.raises(ModelError, match=r"no size has this name. Known: tiny, .*llama3-405b\.$"):
        decoder_spec("qqq")


def test_section_without_overrides_is_the_named_size():
    assert resolve_decoder(ModelSection(name="gpt2"), 300) == decoder_spec("gpt2")


def test_overrides_change_the_shape():
    section = ModelSection(name="tiny", num_layers=2, dim=128, tied=False, norm_eps=1e-6, max_seq_len=64)
    expected = replace(TINY, num_layers=2, dim=128, tied=False, norm_eps=1e-6, max_seq_len=64, vocab_size=777)
    assert resolve_decoder(section, 777) == expected


@pytest.mark.parametrize(("name", "typed", "tokenizer", "expected"), [
    ("tiny", None, 259, 259),
    ("tiny", None, 9000, 9000),
    ("tiny", 512, 259, 512),
    ("gpt2", None, 4096, 50257),
    ("gpt2", 50304, 50257, 50304),
])  # fmt: skip
def test_vocabulary_size_precedence(name, typed, tokenizer, expected):
    assert resolve_decoder(ModelSection(name=name, vocab_size=typed), tokenizer).vocab_size == expected


def test_num_kv_heads_equals_num_heads_unless_grouped():
    assert resolve_decoder(ModelSection(name="gpt2", num_heads=6), 300).num_kv_heads == 6
    assert resolve_decoder(ModelSection(name="gpt2", num_heads=6, num_kv_heads=2), 300).num_kv_heads == 2
    assert resolve_decoder(ModelSection(name="tiny", num_heads=16), 300).num_kv_heads == 4


def test_other_family_drops_rotary_scaling():
    spec = resolve_decoder(ModelSection(name="llama3.2-1b", family="gpt2"), 300)
    assert (spec.family, spec.rope_scale) == ("gpt2", 1.0)


def test_expert_settings_without_experts_are_rejected():
    with pytest.raises(ConfigError) as caught:
        resolve_decoder(ModelSection(name="tiny", top_k=1, balance="bias"), 300)
    assert str(caught.value) == (
        "model.top_k=1: the model has no experts. Use model.num_experts=8 with it, or leave it out.\n"
        "model.balance=bias: the model has no experts. Use model.num_experts=8 with it, or leave it out."
    )
    spec = resolve_decoder(ModelSection(name="tiny", num_experts=4, top_k=1, balance="bias"), 300)
    assert (spec.num_experts, spec.top_k, spec.balance, spec.expert_width) == (4, 1, "bias", TINY.ffn_dim)


def test_all_problems_of_a_model_section_are_reported():
    section = ModelSection(name="tiny", num_heads=6, num_kv_heads=4, vocab_size=300, norm_eps=2.0)
    with pytest.raises(ConfigError) as caught:
        resolve_decoder(section, 4096)
    assert str(caught.value) == (
        "model.num_heads=6: it must divide model.dim=256. Use 4 or 8.\n"
        "model.num_kv_heads=4: it must divide model.num_heads=6. Use 3 or 6.\n"
        "model.norm_eps=2.0: the norms need a small positive number. Use e.g. 1e-5.\n"
        "model.vocab_size=300: the tokenizer has 4096 entries, and each needs a row of the embedding. "
        "Use model.vocab_size=4096, or a tokenizer of at most 300 entries."
    )
    assert [problem.field for problem in caught.value.problems] == [
        "model.num_heads", "model.num_kv_heads", "model.norm_eps", "model.vocab_size"
    ]  # fmt: skip


def test_tokenizer_larger_than_the_vocabulary_is_rejected():
    with pytest.raises(ConfigError) as caught:
        resolve_decoder(ModelSection(name="llama2-7b"), 50_000)
    assert str(caught.value) == (
        "model.vocab_size=32000: the tokenizer has 50000 entries, and each needs a row of the embedding (of llama2-7b)."
        " Use model.vocab_size=50000, or a tokenizer of at most 32000 entries."
    )


def test_unknown_size_in_a_section_is_a_config_error():
    with pytest.raises(ConfigError) as caught:
        resolve_decoder(ModelSection(name="tiney"), 300)
    assert caught.value.problems[0].field == "model.name"
    assert str(caught.value) == "model.name=tiney: no size has this name. Did you mean 'tiny'?"


def test_rotary_settings_without_rotary_positions_are_rejected():
    with pytest.raises(ConfigError, match=r"^model.rope_theta=1000.0: the gpt2 family has learned positions"):
        resolve_decoder(ModelSection(name="gpt2", rope_theta=1000.0), 300)


@pytest.mark.parametrize(("changes", "text"), [
    ({"family": "bert"}, "model.family=bert: not one of llama, gpt2. Use llama."),
    ({"num_layers": 0}, "model.num_layers=0: a whole number of at least 1 is needed. Use e.g. 1."),
    ({"dim": True}, "model.dim=True: a whole number of at least 1 is needed. Use e.g. 1."),
    ({"dim": 24, "num_heads": 8, "num_kv_heads": 8},
        "model.num_heads=8: rotary positions rotate pairs of features, and the head width 24/8=3 is odd. Use 6 or "
        "12."),
    ({"dim": 15, "num_heads": 5, "num_kv_heads": 5},
        "model.num_heads=5: rotary positions rotate pairs of features, and the head width 15/5=3 is odd. Use an even "
        "model.dim, such as 16."),
    ({"rope_theta": 1.0}, "model.rope_theta=1.0: the base of the rotary frequencies must be above 1. Use e.g. 10000."),
    ({"rope_scale": 0.5},
        "model.rope_scale=0.5: the factor on rotary wavelengths must be at least 1. Use 1 for no scaling."),
    ({"norm_eps": 0.0}, "model.norm_eps=0.0: the norms need a small positive number. Use e.g. 1e-5."),
    ({"num_experts": 1},
        "model.num_experts=1: a mixture-of-experts layer needs at least 2 experts. Use 2 or more, or 0 for a dense "
        "model."),
    ({"num_experts": -1}, "model.num_experts=-1: a whole number of at least 0 is needed. Use e.g. 0."),
    ({"num_experts": 4, "family": "gpt2"}, "model.num_experts=4: the gpt2 family has no experts. Use family=llama, or "
     "num_experts=0."),
    ({"num_experts": 4, "top_k": 5}, "model.top_k=5: a token cannot be routed to more than the 4 experts. Use 1 to 4."),
    ({"num_experts": 4, "first_moe_layer": 6},
        "model.first_moe_layer=6: the 6 layers are numbered from 0, so none would have experts. Use 0 to 5."),
    ({"moe_every": 0}, "model.moe_every=0: a whole number of at least 1 is needed. Use e.g. 1."),
    ({"router": "relu"}, "model.router=relu: not one of softmax, sigmoid. Use softmax."),
    ({"balance": "loss"}, "model.balance=loss: not one of aux_loss, bias, none. Use aux_loss."),
    ({"balance_rate": 0.0}, "model.balance_rate=0.0: balancing needs a positive rate. Use e.g. 0.001, or "
     "balance=none."),
    ({"route_scale": 0.0}, "model.route_scale=0.0: the output of the experts is multiplied by it, so it must be "
     "above 0. Use 1."),
    ({"capacity_factor": -1.0},
     "model.capacity_factor=-1.0: a number of at least 0 is needed. Use e.g. 1.25, or 0 to drop no token."),
])  # fmt: skip
def test_shape_rule_errors(changes, text):
    assert [str(problem) for problem in shape_problems(replace(TINY, **changes))] == [text]


def test_odd_head_width_without_rotary_positions_is_valid():
    assert shape_problems(replace(TINY, family="gpt2", dim=24, num_heads=8, num_kv_heads=8)) == ()


counts = st.integers(1, 48)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["llama", "gpt2"]), counts, counts, counts)
def test_suggested_values_satisfy_the_rule(family, dim, num_heads, num_kv_heads):
    spec = DecoderSpec(
        family=family, vocab_size=8, dim=dim, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads,
        ffn_dim=8, max_seq_len=8,
    )  # fmt: skip
    for problem in shape_problems(spec):
        field = problem.field.removeprefix("model.")
        advice = problem.message.rsplit("Use ", 1)[1].rstrip(".")
        if "model.dim" in advice:
            changes = [{"dim": int(advice.rsplit(" ", 1)[1])}]
        else:
            changes = [{field: int(number)} for number in advice.split(" or ")]
        for change in changes:
            same_rule = problem.message.split(": ")[1][:40]
            assert all(same_rule not in later.message for later in shape_problems(replace(spec, **change)))


def test_model_spec_does_not_import_torch():
    program = "import sys, weft.config.shapes.model_spec as m; m.ModelSpec.named('tiny'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
