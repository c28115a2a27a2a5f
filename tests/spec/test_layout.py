"""Layouts: patterns match module paths in order, and parse and format are inverses."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.fields.layout import STYLES, TABLE_STYLES, Layout
from weft.errors import LayoutError

LLAMA_PATHS = ["embed", "blocks.0.norm1", "blocks.0.attn.q", "blocks.11.attn.k", "blocks.0.attn.v",
               "blocks.0.attn.o", "blocks.0.norm2",
               "blocks.0.mlp.gate", "blocks.0.mlp.up", "blocks.0.mlp.down", "norm", "head"]  # fmt: skip


def test_named_layouts_cover_their_models():
    styles = [Layout.named("llama").match(path) for path in LLAMA_PATHS]
    assert styles == ["vocab", "replicate", "colwise", "colwise", "colwise", "rowwise",
                      "replicate", "colwise", "colwise", "rowwise", "replicate", "vocab"]  # fmt: skip
    assert Layout.named("llama").unused(LLAMA_PATHS) == ()
    gpt2_paths = [path for path in LLAMA_PATHS if "gate" not in path] + ["pos_embed"]
    assert None not in [Layout.named("gpt2").match(path) for path in gpt2_paths]
    assert Layout.named("gpt2").unused(gpt2_paths) == ()
    assert Layout.named("gpt2").unused(LLAMA_PATHS) == ("pos_embed",)


def test_moe_layout_covers_experts():
    mlp = {"router": "replicate", "experts": "expert", "shared.gate": "colwise", "shared.down": "rowwise"}
    layout = Layout.named("moe")
    assert {path: layout.match(f"blocks.3.mlp.{path}") for path in mlp} == mlp
    all_moe = layout.fitted([path for path in LLAMA_PATHS if "mlp" not in path] + ["blocks.0.mlp.experts"])
    assert {pattern for pattern, _ in layout.pairs} - {pattern for pattern, _ in all_moe.pairs} == {
        "blocks.*.mlp.{gate,up}", "blocks.*.mlp.down", "blocks.*.mlp.router", "blocks.*.mlp.shared.{gate,up}",
        "blocks.*.mlp.shared.down",
    }  # fmt: skip


def test_first_matching_pattern_wins():
    layout = Layout.parse("blocks.0.attn.q=replicate blocks.*.attn.{q,k}=colwise")
    assert layout.match("blocks.0.attn.q") == "replicate"
    assert layout.match("blocks.1.attn.q") == "colwise"
    for path in ("blocks.1.attn.v", "blocks.1.attn.q.lora", "xblocks.1.attn.q", "blocks.1.2.attn.q", "blocksx0xattnxq"):
        assert layout.match(path) is None


_parts = st.sampled_from(["*", "embed", "blocks", "{q,k}", "0", "mlp"])
_of_layers = [style for style in STYLES if style not in TABLE_STYLES]
_pairs = st.sampled_from([_of_layers, [*TABLE_STYLES, "replicate"]]).flatmap(
    lambda styles: st.dictionaries(st.lists(_parts, min_size=1, max_size=4).map(".".join), st.sampled_from(styles))
)


@settings(max_examples=100, deadline=None)
@given(_pairs.map(lambda pairs: Layout(tuple(pairs.items()))))
def test_layout_text_and_table_round_trip(layout):
    assert Layout.parse(layout.format()) == layout
    assert Layout.from_mapping(dict(layout.pairs)) == layout
    assert hash(Layout.parse(str(layout))) == hash(layout)


def test_layout_is_read_from_a_toml_table():
    table = tomllib.loads('embed = "vocab"\n"blocks.*.attn.o" = "rowwise"')
    assert Layout.from_mapping(table).match("blocks.3.attn.o") == "rowwise"


GOLDEN = {
    "embed=vocb": "embed=vocb: not one of colwise, rowwise, vocab, replicate, partial, expert, spread, spread:data, "
    "rows, columns, one. Did you mean 'vocab'?",
    "embed": "layout entry 'embed': a layout consists of pattern=style entries. Use e.g. embed=vocab.",
    "a..b=vocab": (
        "layout pattern 'a..b': a module path is needed, and '*' or {a,b} may replace its parts. Use e.g. "
        "'blocks.*.attn.q'."
    ),
    "a=vocab a=expert": "layout pattern 'a' is set twice. Keep one.",
}


@pytest.mark.parametrize("text", GOLDEN)
def test_layout_parse_errors(text):
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert str(caught.value) == GOLDEN[text]


def test_unknown_layout_names_and_styles_are_rejected():
    with pytest.raises(LayoutError, match="Did you mean 'llama'"):
        Layout.named("lama")
    with pytest.raises(LayoutError, match="not one of"):
        Layout.from_mapping({"embed": 3})


def test_layout_setting_is_text_or_a_file(tmp_path):
    text = "embed=vocab blocks.*.mlp.up=colwise"
    file = tmp_path / "my.layout"
    file.write_text("# by hand\nembed=vocab\n\nblocks.*.mlp.up=colwise  # half each\n")
    assert Layout.read(text) == Layout.read(file) == Layout.read(str(file)) == Layout.parse(text)
    with pytest.raises(LayoutError, match=r"layout=none.layout: this file cannot be read \(No such file"):
        Layout.read("none.layout")
