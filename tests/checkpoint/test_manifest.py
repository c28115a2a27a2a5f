"""Malicious manifests: COMMIT and digests match, and the content is false."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.checkpoint.load import load_checkpoint, newest_checkpoint, verify_checkpoint
from weft.checkpoint.manifest import FileEntry, Manifest, TensorEntry, commit_text, parse_manifest
from weft.errors import CheckpointError

from .faults import save


def forge(path: Path, text: bytes) -> None:
    (path / "manifest.json").write_bytes(text)
    (path / "COMMIT").write_bytes(commit_text(text))


def rename_file(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        raw["files"][new] = raw["files"].pop(old)
        for members in raw["tensors"].values():
            for entry in members.values():
                entry["file"] = new if entry["file"] == old else entry["file"]

    return change


def put(*keys: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        for key in keys[:-1]:
            raw = raw[key]
        raw[keys[-1]] = value

    return change


W = ("tensors", "model", "w")
LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "other format": (put("format", value="zip"), "format is not 'weft-checkpoint'"),
    "later version": (put("version", value=3), "version=3: this weft reads versions 1 and 2"),
    "other digest": (put("digest", value="md5"), "digest='md5': this weft reads sha256"),
    "step as text": (put("step", value="1"), "step is not a whole number"),
    "step as bool": (put("step", value=True), "step is not a whole number"),
    "negative step": (put("step", value=-1), "step is not a whole number"),
    "files as list": (put("files", value=[]), "files is not a table"),
    "no state": (lambda raw: raw["files"].pop("state.json"), "files has no state.json"),
    "parent folder": (rename_file("model.safetensors", "../model.safetensors"), "'../model.safetensors' is not"),
    "absolute path": (rename_file("model.safetensors", "/etc/passwd"), "'/etc/passwd' is not a legal file name"),
    "sub folder": (rename_file("model.safetensors", "a/b.safetensors"), "'a/b.safetensors' is not a legal file name"),
    "dots": (rename_file("model.safetensors", ".."), "'..' is not a legal file name"),
    "hidden": (rename_file("model.safetensors", ".x.safetensors"), "'.x.safetensors' is not a legal file name"),
    "null byte": (rename_file("model.safetensors", "a\0.safetensors"), "is not a legal file name"),
    "line break": (rename_file("model.safetensors", "a.safetensors\n"), "is not a legal file name"),
    "endless name": (rename_file("model.safetensors", "a" * 5000), "is not a legal file name"),
    "manifest itself": (rename_file("model.safetensors", "manifest.json"), "'manifest.json' is not a legal file name"),
    "file as text": (put("files", "state.json", value="x"), "files.state.json is not a table"),
    "huge file": (put("files", "model.safetensors", "bytes", value=10**30), "files.model.safetensors.bytes is not"),
    "float size": (put("files", "model.safetensors", "bytes", value=4.0), "files.model.safetensors.bytes is not"),
    "larger than real": (put("files", "model.safetensors", "bytes", value=2**47), "instead of 140737488355328"),
    "bad digest": (put("files", "model.safetensors", "sha256", value="AB" * 32), "sha256 is not a SHA-256"),
    "tensors as list": (put("tensors", value=[1]), "tensors is not a table"),
    "group as list": (put("tensors", "model", value=[1]), "tensors.model is not a table"),
    "group as path": (put("tensors", "../x", value={}), "tensors has a group named '../x'"),
    "tensor as list": (put(*W, value=[]), "tensors.model.w is not a table"),
    "unknown dtype": (put(*W, "dtype", value="O8"), "tensors.model.w.dtype='O8' is not a known dtype"),
    "dtype as list": (put(*W, "dtype", value=[1]), "tensors.model.w.dtype='[1]' is not a known dtype"),
    "huge shape": (put(*W, "shape", value=[2**40, 2**40]), "and its file model.safetensors only"),
    "negative shape": (put(*W, "shape", value=[-1000]), "tensors.model.w.shape is not a whole number"),
    "many dims": (put(*W, "shape", value=[1] * 1000), "tensors.model.w.shape is not a list of at most 32 sizes"),
    "shape as text": (put(*W, "shape", value="10"), "tensors.model.w.shape is not a list"),
    "wrong shape": (put(*W, "shape", value=[10, 100]), "tensor 'w' is F32 [1000]; the manifest says F32 [10, 100]"),
    "wrong dtype": (put(*W, "dtype", value="I32"), "tensor 'w' is F32 [1000]; the manifest says I32 [1000]"),
    "unlisted file": (put(*W, "file", value="other.safetensors"), "file='other.safetensors' is not among the files"),
    "json as tensors": (put(*W, "file", value="state.json"), "file='state.json' is not among the files"),
    "tensor too many": (
        put("tensors", "model", "ghost", value={"file": "model.safetensors", "dtype": "F32", "shape": [1]}),
        "tensor 'ghost' is in the manifest but not in the file",
    ),
    "tensor too few": (lambda raw: raw["tensors"]["model"].pop("b"), "tensor 'b' is in the file but not in"),
    "tied to nothing": (put(*W, "same_as", value="ghost"), "shares memory with a tensor that is missing or differs"),
    "tied to itself": (put(*W, "same_as", value="w"), "shares memory with a tensor that is missing or differs"),
    "tied unlike": (put(*W, "same_as", value="b"), "shares memory with a tensor that is missing or differs"),
    "tied to a number": (put(*W, "same_as", value=3), "tensors.model.w.same_as is not a name"),
    "two owners": (
        put("tensors", "third", value={"w": {"file": "model.safetensors", "dtype": "F32", "shape": [1000]}}),
        "two tensors named 'w' are in model.safetensors",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_false_manifest_is_an_error_and_previous_checkpoint_is_loaded(tmp_path, name):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())  # Decoy for '../'.
    raw = json.loads((path / "manifest.json").read_bytes())
    change, message = LIES[name]
    change(raw)
    forge(path, json.dumps(raw).encode())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    assert message in str(caught.value)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert message in found.passed_over[0].reason


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"\x00\xff", b"{" * 50_000, b'{"format": NaN}', b"PK\x03\x04"])
def test_invalid_manifest_is_reported(tmp_path, text):
    path = save(tmp_path, 1)
    forge(path, text)
    assert verify_checkpoint(path)[0].startswith("manifest.json: ")


def test_duplicate_tensor_name_is_rejected(tmp_path):
    path = save(tmp_path, 1)
    text = (path / "manifest.json").read_bytes()
    forge(path, text.replace(b'"b": {', b'"w": {'))
    assert verify_checkpoint(path) == ["manifest.json: not valid JSON (the key 'w' appears twice)"]


@pytest.mark.parametrize(
    "header", [b"", b"\xff" * 8 + b"{}", (2**60).to_bytes(8, "little"), b"\x02" + b"\0" * 7 + b"[]"]
)
def test_forged_tensor_file_raises_checkpoint_error(tmp_path, header):
    path = save(tmp_path, 1)
    raw = json.loads((path / "manifest.json").read_bytes())
    file = path / "model.safetensors"
    file.write_bytes(header.ljust(5000, b" "))
    raw["files"]["model.safetensors"]["bytes"] = 5000
    forge(path, json.dumps(raw).encode())
    assert verify_checkpoint(path, digests=False)[0].startswith("model.safetensors: not a safetensors file (")
    with pytest.raises(CheckpointError):
        load_checkpoint(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=8), children, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_value_gives_an_error_or_a_valid_manifest(data):
    entry = TensorEntry("model.safetensors", "F32", (2, 3))
    files = {"model.safetensors": FileEntry(24, "0" * 64), "state.json": FileEntry(3, "1" * 64)}
    raw: Any = json.loads(Manifest(3, files, {"model": {"w": entry}}).to_bytes())
    place = raw
    while True:
        keys = list(range(len(place))) if isinstance(place, list) else list(place)
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    try:
        parsed = parse_manifest(json.dumps(raw).encode())
    except CheckpointError:
        return
    assert parse_manifest(parsed.to_bytes()) == parsed


def test_manifest_round_trip():
    entries = {"w": TensorEntry("model.safetensors", "BF16", (2, 3)), "s": TensorEntry("model.safetensors", "I64", ())}
    entries["tied"] = TensorEntry("model.safetensors", "BF16", (2, 3), same_as="w")
    files = {"model.safetensors": FileEntry(100, "0" * 64), "state.json": FileEntry(3, "1" * 64)}
    manifest = Manifest(12, files, {"model": entries, "empty": {}}, {"weft": "0.1.0"})
    assert parse_manifest(manifest.to_bytes()) == manifest
