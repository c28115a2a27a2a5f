"""For any file: one outcome for each key or clear errors. For any batch: DeepSpeed's arithmetic."""

from __future__ import annotations

import json
import math
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.deepspeed.goldens import FOLDER, RANKS, USED, refused
from weft.config.files import format_config, load_config
from weft.config.parsing import dotted
from weft.errors import ConfigError
from weft.interop.deepspeed import MICRO, PASSES, TOTAL, import_deepspeed
from weft.interop.deepspeed_keys import known_keys, meant, read_source

_scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 70)
    | st.sampled_from(
        ["auto", "cpu", "none", "AdamW", "SGD", "WarmupLR", "WarmupDecayLR", "OneCycle", "linear", "bf16"]
    )
    | st.sampled_from([1e-4, 0.9, 5e8, 1.0, 10**20, 10**400, math.inf, math.nan, -0.5, 2.5])
    | st.text(max_size=5)
)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(sorted(known_keys()))
_used = st.sampled_from(sorted(USED))
_translated = st.sampled_from(sorted(key for key, group in known_keys().items() if group.outcome == "becomes"))
_mistyped = st.builds(
    lambda name, at: name[: at % len(name)] + name[at % len(name) + 1 :], _names, st.integers(0, 60)
).filter(lambda name: all(name.split(".")))


def _right(key: str) -> st.SearchStrategy[object]:
    """Return valid values of the key, if they are listed here."""
    if key in USED:
        return st.sampled_from(USED[key])
    if key.endswith(("size", "stages", "interval", "checkpoints", "steps")):
        return st.integers(0, 8)
    return (
        st.booleans() | st.just("auto") if key.endswith(("enabled", "mode", "nesterov")) else st.sampled_from([0, 0.5])
    )


@st.composite
def configs(draw):
    """Draw tables with existing and misspelled keys, and with valid values in about half of the cases."""
    tables: dict[str, object] = {}
    for key in draw(st.lists(_used | _used | _translated | _names | _mistyped, max_size=12)):
        *parents, name = key.split(".")
        node = tables
        for parent in parents:
            inner = node.setdefault(parent, {})
            node = inner if isinstance(inner, dict) else node
        node[name] = draw(_right(key) if draw(st.integers(0, 4)) else _values)
    return tables


def leaves(table: dict[str, object], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, value in table.items():
        inner = (*path, name)
        found += leaves(value, inner) if isinstance(value, dict) and value else [inner]
    return found


def check_sentences(error: ConfigError) -> None:
    assert error.problems
    for problem in error.problems:
        assert problem.message.endswith((".", "?")), problem.message
        assert problem.message.isprintable()


@settings(max_examples=300, deadline=None)
@given(configs(), st.none() | st.integers(1, 16))
def test_each_key_has_exactly_one_outcome(config, world_size):
    before = repr(config)
    try:
        imported = import_deepspeed(config, world_size, not_built=())
    except ConfigError as error:
        check_sentences(error)
        return
    finally:
        assert repr(config) == before
    counts = Counter(line.key for line in imported.lines)
    assert not [key for key, count in counts.items() if count > 1]
    for leaf in leaves(config):
        above = {dotted(leaf[: depth + 1]) for depth in range(len(leaf))}
        assert len(above & counts.keys()) == 1, leaf
    for line in imported.lines:
        assert str(line).isprintable()
    text = format_config(imported.config())
    assert text.startswith("plan = ")
    assert set(imported.open).isdisjoint(imported.overrides)


@settings(max_examples=60, deadline=None)
@given(configs())
def test_import_without_refusals_is_a_valid_config(tmp_path_factory, config):
    with suppress(ConfigError):
        imported = import_deepspeed(config, 1)
        if not refused(imported):
            file = tmp_path_factory.mktemp("import") / "weft.toml"
            file.write_text(format_config(imported.config()))
            assert load_config(file).config == imported.config()


CORPUS = [(FOLDER / f"{name}.json").read_text() for name in RANKS]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(CORPUS), st.integers(0, 10**6), st.integers(0, 20), st.binary(max_size=6))
def test_damaged_file_is_a_clear_error(tmp_path_factory, text, at, length, put):
    raw = text.encode()
    at %= len(raw)
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    file.write_bytes(raw[:at] + put + raw[at + length :])
    try:
        imported = import_deepspeed(file)
    except ConfigError as error:
        check_sentences(error)
        return
    imported.config()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_bytes_that_are_no_config(tmp_path_factory, raw):
    file = tmp_path_factory.getbasetemp() / "bytes.json"
    file.write_bytes(raw)
    with suppress(ConfigError):
        import_deepspeed(file)


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{'a': 1}", ":1: JSON keys and strings have double quotes, not single ones:"),
        ('{"a": True}', ":1: this is not JSON: expecting value in "),
        ('{"a": 1', ":1: this is not JSON: "),
        ("", ":1: the file is empty. A DeepSpeed config is a JSON object: { ... }."),
        ("[1]", ":1: a DeepSpeed config is a JSON object, but this is a list."),
        ("3", ":1: a DeepSpeed config is a JSON object, but this is a single value."),
        ('{"aio": {"a": NaN}}', ":1: NaN is not a JSON number. Write a finite number, or leave the key out."),
        ('{"steps_per_print":\n Infinity}', ":2: Infinity is not a JSON number."),
        ('{"gradient_clipping": 1e999}', ":1: 1e999 is not a JSON number."),
        ('{"bf16": {},\n\n"bf16": {}}', ":3: bf16 is set twice, first in line 1. Keep one."),
        ('{"fp16": {"enabled": true, "enabled": false}}', ":1: fp16.enabled is set twice, first in line 1."),
        ('{"a":' * 41 + "1" + "}" * 41, ":1: tables are nested more than 40 deep. Flatten them."),
        ('{"a":' + "[" * 100_000, ":1: "),
        ('{"train_batch_size": ' + "9" * 5000 + "}", ":1: a number has thousands of digits."),
        ('{"a": "\\x"}', ":1: this is not JSON: invalid \\escape"),
    ],
)
def test_invalid_json_errors(tmp_path, text, sentence):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        import_deepspeed(file)
    assert len(caught.value.problems) == 1
    assert str(caught.value).startswith(str(file))
    assert sentence in str(caught.value)


def test_comments_trailing_commas_and_quoted_numbers_are_read(tmp_path):
    plain = '{"train_batch_size": 8, "gradient_clipping": 0.5, "zero_optimization": {"stage": 2}}'
    loose = """// for 8 GPUs
{
  "train_batch_size": "8",  # per step
  /* a comment
     of two lines */ "gradient_clipping": "0.5",
  "zero_optimization": {"stage": 2,},   // "stage": 3
}
"""
    (tmp_path / "plain.json").write_text(plain)
    (tmp_path / "loose.json").write_text(loose)
    first, second = (import_deepspeed(tmp_path / f"{name}.json") for name in ("plain", "loose"))
    assert first.config() == second.config()


def test_comment_characters_in_strings_are_preserved():
    text = '{"a": "x // y, # z,}", "b": ["c,]",\n // d\n ], "url": "http://h/#a", "quote": "\\" // e"}'
    read = {"a": "x // y, # z,}", "b": ["c,]"], "url": "http://h/#a", "quote": '" // e'}
    assert read_source(text).tables == read


def test_line_number_of_an_error_counts_comments(tmp_path):
    (tmp_path / "ds.json").write_text('{\n/* a\n b */\n"a": 1,\n"b": tru\n}')
    with pytest.raises(ConfigError, match=r"ds\.json:5: this is not JSON"):
        import_deepspeed(tmp_path / "ds.json")


def test_unreadable_file_is_reported(tmp_path):
    (tmp_path / "ds_config.json").write_bytes(b'{"a": "\xff"}')
    for path, sentence in (
        (tmp_path / "ds_confg.json", "there is no such file. Did you mean 'ds_config.json'?"),
        (tmp_path, "this is a folder. Name a JSON file in it."),
        ("a\0b", "it cannot be read ("),
        (tmp_path / "ds_config.json", ":1: byte 0xff is not UTF-8 text. Save the file as UTF-8."),
    ):
        with pytest.raises(ConfigError) as caught:
            import_deepspeed(path)
        assert sentence in str(caught.value)


def test_recursive_dict_is_refused():
    loop: dict[str, object] = {}
    loop["aio"] = {"block_size": [loop, loop]}
    with pytest.raises(ConfigError, match="nested more than 40 deep"):
        import_deepspeed(loop)


def test_text_with_a_byte_order_mark(tmp_path):
    file = tmp_path / "ds.json"
    file.write_bytes(b'\xef\xbb\xbf{"bf16": {"enabled": true}}')
    assert import_deepspeed(file).plan == "dp_replicate=* precision=bf16"
    assert import_deepspeed('\ufeff{"bf16": {"enabled": true}}').plan == "dp_replicate=* precision=bf16"


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(0, 2), st.data())
def test_batch_arithmetic_matches_deepspeed(micro, passes, ranks, stage, data):
    """If any of the four numbers is missing, the others determine it as in DeepSpeed, or it is reported as open."""
    whole = {TOTAL: micro * passes * ranks, MICRO: micro, PASSES: passes}
    hidden = data.draw(st.lists(st.sampled_from([*whole, "ranks"]), max_size=1))
    config: dict[str, object] = {"zero_optimization": {"stage": stage}}
    for key, value in whole.items():
        if key not in hidden:
            config[key] = value
        elif data.draw(st.booleans()):
            config[key] = "auto"
    known_ranks = None if "ranks" in hidden else ranks
    imported = import_deepspeed(config, known_ranks)
    settings_, plan = imported.overrides, dict(word.split("=") for word in imported.plan.split())
    assert settings_["train.global_batch"] == whole[TOTAL]
    assert int(plan.get("accumulation", 1)) == passes
    axis = "dp_shard" if stage and ranks > 1 else "dp_replicate"
    assert plan.get(axis, "1") == str(ranks)
    assert "train.global_batch" not in imported.open


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 300))
def test_contradictory_batch_is_refused(micro, passes, ranks, total):
    config = {TOTAL: total, MICRO: micro, PASSES: passes}
    if total == micro * passes * ranks:
        assert import_deepspeed(config, ranks).overrides["train.global_batch"] == total
        return
    with pytest.raises(ConfigError) as caught:
        import_deepspeed(config, ranks)
    (problem,) = caught.value.problems
    assert problem.field == TOTAL
    assert f"Use train_batch_size={micro * passes * ranks}, or change the others." in problem.message


def test_unknown_number_of_ranks_is_left_open_and_reported():
    imported = import_deepspeed({MICRO: 4, PASSES: 2})
    assert "train.global_batch" in imported.open
    assert "train.global_batch is 4 x 2 x the data-parallel ranks" in imported.notes[0]
    imported = import_deepspeed({TOTAL: 64, MICRO: 4})
    assert "plan.accumulation" in imported.open
    assert imported.overrides["train.global_batch"] == 64


@settings(max_examples=200, deadline=None)
@given(_names, st.integers(0, 60))
def test_key_with_a_missing_letter_gets_a_suggestion(key, at):
    section, _, name = key.rpartition(".")
    typed = name[: at % len(name)] + name[at % len(name) + 1 :]
    if len(typed) < 6 or dotted((*section.split("."), typed) if section else (typed,)) in known_keys():
        return
    assert "Did you mean" in meant(section, typed)


def test_text_and_parsed_json_give_the_same_import():
    for text in CORPUS:
        assert import_deepspeed(text, not_built=()).lines == import_deepspeed(json.loads(text), not_built=()).lines
