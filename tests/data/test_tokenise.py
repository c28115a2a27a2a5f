from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from weft.data.text import tokenize as tokenise_module
from weft.data.text.schema import Schema, detect_schema
from weft.data.text.source import find_files
from weft.data.text.tokenize import ReadLimits, SourceManifest, chunk_bytes, tokenise_source
from weft.data.text.tokenizer import Tokenizer, save_bytes_tokenizer
from weft.data.token_files import SplitReader
from weft.errors import DataError


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return save_bytes_tokenizer(tmp_path / "tokenizer")


def tokenise(
    tmp_path: Path, tokenizer: Tokenizer, path: Path, *, holdout: float = 0.0, max_bad: float = 0.01, **options: Any
) -> tuple[Path, SourceManifest]:
    files = find_files(str(path), "data.train.0")
    folder = tmp_path / "out"
    folder.mkdir()
    schema = detect_schema(files, "auto", {}, 1000)
    limits = ReadLimits(holdout, 1000, max_bad)
    keep = tmp_path / "kept.jsonl"
    return folder, tokenise_source(files, schema, tokenizer, limits, folder, keep_quarantine=keep, **options)


def documents(folder: Path, manifest: SourceManifest, tokenizer: Tokenizer, split: str = "train") -> list[str]:
    reader = SplitReader(folder / split, manifest.splits[split])
    bounds = reader.offsets.tolist()
    return [
        tokenizer.decode(reader.tokens(first, last - first), specials=True)
        for first, last in itertools.pairwise(bounds)
    ]


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def test_each_document_ends_with_one_end_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "t<|endoftext|>wo"}])
    folder, manifest = tokenise(tmp_path, tokenizer, path, shard_bytes=8)
    assert documents(folder, manifest, tokenizer) == ["one<|endoftext|>", "t<|endoftext|>wo<|endoftext|>"]
    reader = SplitReader(folder / "train", manifest.splits["train"])
    assert (reader.tokens(0, reader.num_tokens) == tokenizer.end_id).sum() == 2
    assert manifest.splits["train"].num_trained == reader.num_tokens
    assert SourceManifest.read(folder) == manifest


def test_ids_keep_their_end_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    end = tokenizer.end_id
    records = [{"input_ids": [65, 66], "loss_mask": [0, 1]}, {"input_ids": [67, end], "loss_mask": [1, 0]}]
    folder, manifest = tokenise(tmp_path, tokenizer, write_jsonl(tmp_path / "a.jsonl", records))
    assert documents(folder, manifest, tokenizer) == ["AB<|endoftext|>", "C<|endoftext|>"]
    reader = SplitReader(folder / "train", manifest.splits["train"])
    trained = reader.trained(0, 5)
    assert trained is not None
    assert trained.tolist() == [0, 1, 1, 1, 0]


def test_end_of_a_conversation_is_not_trained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    record = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    _, manifest = tokenise(tmp_path, tokenizer, write_jsonl(tmp_path / "a.jsonl", [record]))
    assert manifest.splits["train"].num_trained == 2
    assert manifest.splits["train"].has_mask


def test_large_text_file_without_holdout_is_one_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "".join(f"line {n}\n" for n in range(2000))
    (tmp_path / "a.txt").write_text(text)
    folder, manifest = tokenise(tmp_path, tokenizer, tmp_path / "a.txt")
    assert documents(folder, manifest, tokenizer) == [text + "<|endoftext|>"]


def test_chunks_of_a_single_file_are_used_for_evaluation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = "".join(f"line {n}\n" for n in range(20_000))
    (tmp_path / "a.txt").write_text(text)
    folder, manifest = tokenise(tmp_path, tokenizer, tmp_path / "a.txt", holdout=0.05)
    train, held_out = (documents(folder, manifest, tokenizer, split) for split in ("train", "eval"))
    assert len(held_out) >= 1
    lines = "".join(part.removesuffix("<|endoftext|>") for part in train + held_out).splitlines()
    assert sorted(lines) == sorted(text.splitlines())
    share = manifest.splits["eval"].num_tokens / len(text)
    assert 0.01 < share < 0.12
    # Adjacent training chunks are one document: at most one more than there are gaps.
    assert len(train) <= len(held_out) + 1


def test_chunk_size_depends_on_holdout_and_total_size(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("x" * 50_000)
    files = find_files(str(tmp_path), "f")
    assert chunk_bytes(files, 0.5) == 2**20
    assert chunk_bytes(files, 0.0) == 2**20
    assert chunk_bytes(files, 0.02) == 20 * 50_000 * 0.02 / 8


def test_split_does_not_depend_on_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [{"text": f"document {n}"} for n in range(400)]
    held_out = []
    for number, order in enumerate((records, records[::-1])):
        (tmp_path / str(number)).mkdir()
        path = write_jsonl(tmp_path / str(number) / "a.jsonl", order)
        folder, manifest = tokenise(tmp_path / str(number), tokenizer, path, holdout=0.1)
        held_out.append(sorted(documents(folder, manifest, tokenizer, "eval")))
        assert manifest.splits["train"].num_documents + len(held_out[-1]) == 400
    assert held_out[0] == held_out[1]
    assert 20 <= len(held_out[0]) <= 60


def test_broken_records_are_counted_and_quarantined(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [{"text": f"d{n}"} for n in range(20)]
    path = write_jsonl(tmp_path / "a.jsonl", [*records[:3], "{oops", *records[3:], {"text": 4}, {"text": "z" * 2000}])
    folder, manifest = tokenise(tmp_path, tokenizer, path, max_bad=0.2)
    assert (manifest.num_records, manifest.splits["train"].num_documents) == (23, 20)
    assert manifest.broken == {"invalid JSON": 1, "not a string": 1, "too long": 1}
    lines = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["number"], line["reason"]) for line in lines] == [
        (4, "invalid JSON"), (22, "not a string"), (23, "too long"),
    ]  # fmt: skip
    assert lines[0] == {"file": str(path), "number": 4, "reason": "invalid JSON", "excerpt": "{oops\n"}


def test_too_many_broken_records_stop_the_run(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, "{oops", {"text": 1}, *[{"text": "b"}] * 37])
    with pytest.raises(DataError) as caught:
        tokenise(tmp_path, tokenizer, path, max_bad=0.04)
    assert str(caught.value) == (
        f"data.train.0.path={path}: 2 of 40 records are broken (1 invalid JSON, 1 not a string), more than "
        f"data.max_bad_fraction=0.04 allows; the first is {path}:2. "
        f"Repair them (all are in {tmp_path / 'kept.jsonl'}), or set a larger data.max_bad_fraction."
    )
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 2


def test_mostly_broken_source_stops_early(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, *["{oops"] * 5000])
    with pytest.raises(DataError, match=r"11 of the first 12 records are broken .* Repair them \(these are in "):
        tokenise(tmp_path, tokenizer, path)


def test_empty_text_files_are_no_broken_records(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "d").mkdir()
    for number in range(10):
        (tmp_path / "d" / f"{number}.py").write_text("\n" * (number % 2))
    (tmp_path / "d" / "x.py").write_text("x = 1\n")
    folder, manifest = tokenise(tmp_path, tokenizer, tmp_path / "d")
    assert documents(folder, manifest, tokenizer) == ["x = 1\n<|endoftext|>"]
    assert (manifest.num_records, manifest.broken) == (1, {})


def test_broken_chunk_is_a_border(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Chunks before and after it, and chunks of the next file, are separate documents."""
    (tmp_path / "d").mkdir()
    piece = b"x" * 255 + b"\n"
    bad = b"\xff" * 255 + b"\n"
    (tmp_path / "d" / "a.txt").write_bytes(piece + bad + piece * 2)
    (tmp_path / "d" / "b.txt").write_bytes(piece + bad * 2)
    (tmp_path / "d" / "c.txt").write_bytes(bad + piece * 2)
    folder, manifest = tokenise(tmp_path, tokenizer, tmp_path / "d", holdout=1e-9, max_bad=0.9)
    assert [len(text.removesuffix("<|endoftext|>")) for text in documents(folder, manifest, tokenizer)] == [
        256,
        512,
        256,
        512,
    ]
    assert manifest.broken == {"invalid UTF-8": 3}


def test_progress_ends_at_the_file_size(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"d{n}"} for n in range(1000)])
    seen: list[tuple[str, int, int]] = []
    tokenise(tmp_path, tokenizer, path, report=lambda *args: seen.append(args))
    size = path.stat().st_size
    assert {(stage, total) for stage, _, total in seen} == {(f"tokenise {path}", size)}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == size
    assert len(seen) > 3


def test_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"d{n}"} for n in range(1000)])

    def overwrite(*_: object) -> None:
        path.write_text('{"text": "other"}\n')

    with pytest.raises(DataError, match="the file changed while it was read"):
        tokenise(tmp_path, tokenizer, path, report=overwrite)


def test_long_record_is_tokenized_in_chunks_of_one_document(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenise_module, "_LONG_CHARS", 16)
    records = [{"text": "short"}, {"text": "a long text of many words, é and more"}, {"text": "last"}]
    folder, manifest = tokenise(tmp_path, tokenizer, write_jsonl(tmp_path / "a.jsonl", records), holdout=0.0)
    assert documents(folder, manifest, tokenizer) == [f"{record['text']}<|endoftext|>" for record in records]


def test_completion_and_its_end_are_trained_without_the_prompt(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1 + 1 =", "completion": " 2"}])
    folder, manifest = tokenise(tmp_path, tokenizer, path)
    assert documents(folder, manifest, tokenizer) == ["1 + 1 = 2<|endoftext|>"]
    trained = SplitReader(folder / "train", manifest.splits["train"]).trained(0, 10)
    assert trained is not None
    assert trained.tolist() == [0] * 7 + [1] * 3


def test_instruction_is_a_chat_with_only_the_answer_trained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records = [
        {"system": "be brief", "instruction": "Translate.", "input": "Haus", "output": "house"},
        {"system": "", "instruction": "Say hi.", "input": None, "output": "hi"},
    ]
    folder, manifest = tokenise(tmp_path, tokenizer, write_jsonl(tmp_path / "a.jsonl", records))
    assert documents(folder, manifest, tokenizer) == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nTranslate.\n\nHaus<|im_end|>\n"
        "<|im_start|>assistant\nhouse<|im_end|>\n<|endoftext|>",
        "<|im_start|>user\nSay hi.<|im_end|>\n<|im_start|>assistant\nhi<|im_end|>\n<|endoftext|>",
    ]
    assert manifest.splits["train"].num_trained == len("house") + 1 + len("hi") + 1


def test_chat_requires_chat_tokens(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "has_chat", property(lambda _: False))
    record = {"messages": [{"role": "assistant", "content": "a"}]}
    with pytest.raises(DataError, match=r"messages need a tokenizer with <\|im_start\|> and <\|im_end\|>"):
        tokenise(tmp_path, tokenizer, write_jsonl(tmp_path / "a.jsonl", [record]))


def test_schema_is_stored(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _, manifest = tokenise(tmp_path, tokenizer, write_jsonl(tmp_path / "a.jsonl", [{"body": "x"}]))
    assert Schema(**manifest.schema) == Schema("text", text="body")
