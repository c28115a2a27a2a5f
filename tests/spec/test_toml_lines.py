"""Line numbers of TOML keys, checked with files whose values are their line numbers."""

from __future__ import annotations

import tomllib

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.parsing import dotted, error_line, key_lines, split_key

TEXT = '''seed = 1 # [not.a.table]
plan = """a = 3
[b]
"""  # c
'quoted "key"' = 5

[run]
name = "a # b = \\" [x]"
dir.deep."x.y" = [9, 9, { in = 9 }] # after

[[data.train]]
path = 12
columns = { text = "body", "a.b" = 'c' }

  [ data . "eval" ]
[[data.train]]
path = 17
[data.train.columns]
text = 19
[optimizer]
betas = [
  22,  # [
  23, [
    24,
  ]
]
quotes = \'\'\'\'27'\'\'\'\'
lr = 28'''


def test_lines_of_every_form_of_key():
    lines = {dotted(path): line for path, line in key_lines(TEXT).items()}
    assert lines == {
        "seed": 1, "plan": 2, '"quoted \\"key\\""': 5, "run": 7, "run.name": 8,
        "run.dir": 9, "run.dir.deep": 9, 'run.dir.deep."x.y"': 9, 'run.dir.deep."x.y".0': 9,
        'run.dir.deep."x.y".1': 9, 'run.dir.deep."x.y".2': 9, 'run.dir.deep."x.y".2.in': 9,
        "data": 11, "data.train": 11, "data.train.0": 11, "data.train.0.path": 12, "data.train.0.columns": 13,
        "data.train.0.columns.text": 13, 'data.train.0.columns."a.b"': 13, "data.eval": 15,
        "data.train.1": 16, "data.train.1.path": 17, "data.train.1.columns": 18, "data.train.1.columns.text": 19,
        "optimizer": 20, "optimizer.betas": 21, "optimizer.betas.0": 22, "optimizer.betas.1": 23,
        "optimizer.betas.2": 23, "optimizer.betas.2.0": 24, "optimizer.quotes": 27, "optimizer.lr": 28,
    }  # fmt: skip


def paths_of(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in items:
        yield from paths_of(inside, (*path, key))


_values = st.recursive(
    st.integers(0, 9) | st.booleans() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.text(max_size=5), _values, max_size=4), st.booleans())
def test_reported_line_of_every_key_contains_the_key(tables, multiline):
    text = tomli_w.dumps(tables, multiline_strings=multiline)
    lines = key_lines(text)
    typed = text.split("\n")
    assert set(lines) == {path for path in paths_of(tomllib.loads(text)) if path}
    for path, line in lines.items():
        if isinstance(path[-1], str) and path[-1].isalnum() and path[-1].isascii():
            assert path[-1] in typed[line - 1]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\nb = \n", 2),
        ("a = 1\na = 2\n", 2),
        ("a = 'x\nb = 2\nc = 3\n", 1),
        ("a = 1\nb = 'x\n\n", 2),
        ("a = 1\n\nb = '''x\n", 3),
        ("x", 1),
        ("\n[a\n\n\n", 2),
        ("a = 1\nb = " + "9" * 5000 + "\nc = 3", 2),
    ],
)
def test_syntax_errors_have_a_line(text, line):
    with pytest.raises(tomllib.TOMLDecodeError if len(text) < 99 else ValueError) as caught:
        tomllib.loads(text)
    found, reason = error_line(caught.value, text)
    assert found == line
    assert reason
    assert "line" not in reason


def test_dotted_keys_are_split_and_joined():
    assert split_key('a."b.c".0') == ("a", "b.c", "0")
    assert dotted(("a", "b.c", 0)) == 'a."b.c".0'
    for text in ("", "a.", ".a", "a b", "a=b", "a\nb", "[a]", "a#"):
        with pytest.raises(ValueError, match=r"key|TOML|Invalid|Expected|[Uu]n|character"):
            split_key(text)
