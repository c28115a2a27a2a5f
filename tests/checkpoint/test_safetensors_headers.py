"""Safetensors headers and indexes: Weft rejects everything that the safetensors package rejects."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from weft.checkpoint.pretrained import stored_weights
from weft.checkpoint.safetensors_files import RangedTensors
from weft.errors import CheckpointError

A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EMPTY = {**A, "shape": [0], "data_offsets": [0, 0]}


def write(file: Path, header: object, size: int) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return file


def is_refused(file: Path) -> bool:
    try:
        RangedTensors(file)
    except CheckpointError:
        return True
    return False


def is_refused_by_the_package(file: Path) -> bool:
    try:
        safe_open(str(file), "numpy")
    except SafetensorError:
        return True
    return False


BOTH_REFUSE = {
    "overlap": ({"a": A, "b": A}, 8),
    "hole before the first": ({"a": {**A, "data_offsets": [4, 12]}}, 12),
    "hole between": ({"a": A, "b": {**A, "data_offsets": [12, 20]}}, 20),
    "bytes after the last": ({"a": A}, 4008),
    "shape of floats": ({"a": {**A, "shape": [2.0]}}, 8),
    "shape of booleans": ({"a": {**A, "shape": [True], "data_offsets": [0, 4]}}, 4),
    "offsets of floats": ({"a": {**A, "data_offsets": [0.0, 8]}}, 8),
    "three offsets": ({"a": {**A, "data_offsets": [0, 4, 8]}}, 8),
    "negative shape": ({"a": {**A, "shape": [-1, -2]}}, 8),
    "product of the shape": ({"a": {**A, "shape": [2**33, 2**33, 0], "data_offsets": [0, 0]}}, 0),
    "metadata of numbers": ({"__metadata__": {"a": 1}, "a": A}, 8),
    "metadata is a list": ({"__metadata__": [], "a": A}, 8),
    "half a surrogate pair in a name": ({"\ud800": A}, 8),
    "half a surrogate pair in metadata": ({"__metadata__": {"a": "\udfff"}, "a": A}, 8),
    "depth": (b'{"a":' + b"[" * 100_000, 0),
    "header too large": (b"{}" + b" " * 100_000_000, 0),
    "no object": ([], 0),
    "unknown dtype": ({"a": {**A, "dtype": "F33"}}, 8),
    "missing field": ({"a": {"dtype": "F32", "shape": [2]}}, 8),
    "not JSON": (b"{'a': 1}", 0),
    "NaN": (b'{"a": NaN}', 0),
}
ONLY_WEFT_REFUSES = {
    "same key twice": (b'{"a":%b,"a":%b}' % ((json.dumps(A).encode(),) * 2), 8),
    "spaces before": (b"  " + json.dumps({"a": A}).encode(), 8),
}
FINE = {
    "plain": ({"a": A, "__metadata__": {"format": "pt"}}, 8),
    "padded": (json.dumps({"a": A}).encode() + b"   ", 8),
    "another order": ({"b": {**A, "data_offsets": [8, 16]}, "a": A}, 16),
    "empty tensors": ({"e": EMPTY, "a": A, "f": {**EMPTY, "data_offsets": [8, 8]}, "g": EMPTY}, 8),
    "scalar": ({"a": {**A, "shape": [], "data_offsets": [0, 4]}}, 4),
    "more fields": ({"a": {**A, "note": 1}}, 8),
    "no tensors": ({}, 0),
}


@pytest.mark.parametrize("case", [*BOTH_REFUSE, *ONLY_WEFT_REFUSES, *FINE])
def test_headers_are_checked_by_the_rules_of_the_package(tmp_path: Path, case: str) -> None:
    header, size = {**BOTH_REFUSE, **ONLY_WEFT_REFUSES, **FINE}[case]
    file = write(tmp_path / "model.safetensors", header, size)
    assert is_refused(file) == (case not in FINE)
    assert is_refused_by_the_package(file) == (case in BOTH_REFUSE)


def test_random_headers_rejected_by_the_package_are_rejected(tmp_path: Path) -> None:
    rng = random.Random(3)
    values = [0, 1, 2, 8, 16, -1, 2**63, 2**64, 2.0, True, None, "2", [], {}]
    for number in range(600):
        header = {name: {**A, "data_offsets": [8 * place, 8 * place + 8]} for place, name in enumerate("abc")}
        for _ in range(rng.choice([0, 1, 1, 2])):
            one = header[rng.choice("abc")]
            field = rng.choice(["shape", "data_offsets", "dtype"])
            one[field] = rng.choice([[rng.choice(values) for _ in range(rng.choice([1, 2, 2, 3]))], rng.choice(values)])
        file = write(tmp_path / f"{number}.safetensors", header, rng.choice([24, 24, 25, 0]))
        assert is_refused(file) or not is_refused_by_the_package(file), header


@pytest.mark.parametrize("index", [
    b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {"a": "../x.safetensors"}}', b'{"weight_map": {"a": 1}}',
    b'{"weight_map": {"a": "/etc/x.safetensors"}}', b'{"weight_map": {"a": "x\\u0000.safetensors"}}',
    b'{"weight_map": {"a": "\\ud800.safetensors"}}', b'{"weight_map": {"a": "..safetensors/../x.safetensors"}}',
    b'{"weight_map": {"a": "' + b"x" * 5000 + b'.safetensors"}}', b'{"weight_map": ' + b'{"a":' * 100_000,
    b'{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', b"\xff",
    b'{"weight_map": {"a": "pipe.safetensors"}}',
    b'{"weight_map": {"a": "gone.safetensors"}}', b'{"weight_map": {"b": "m.safetensors"}}',
])  # fmt: skip
def test_index_that_is_not_a_table_of_local_files_is_rejected(tmp_path: Path, index: bytes) -> None:
    write(tmp_path / "m.safetensors", {"a": A}, 8)
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointError, match=r"^model\.path=.* again\.$"):
        stored_weights(tmp_path)


def test_pipe_instead_of_weights_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="neither"):
        stored_weights(tmp_path)
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="bytes"):
        RangedTensors(tmp_path / "x.safetensors")
