"""The cache of tokenised data: tokenizers and shards, each made once under a lock, checked when they are taken out."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.data.order import write_plan
from weft.data.prepared.prepared_data import key_of
from weft.data.prepared.wanted import WantedSource, content_digests
from weft.data.read import Schema
from weft.data.shards import SplitReader, locked, new_folder, size_problems, verify_split
from weft.data.tokens import (
    FORMAT_VERSION,
    QUARANTINE,
    Report,
    SourceManifest,
    Tokenizer,
    find_tokenizer_file,
    import_tokenizer,
    save_bytes_tokenizer,
    split_of,
    tokenise_source,
    too_many_broken,
    train_bpe,
)
from weft.errors import DataError
from weft.spec import RunConfig

_CHECKED = "checked.json"
#: How long a check of the digests is believed, while no file is written to: a disk may forget without being asked.
_CHECK_HOLDS_S = 24 * 3600
#: A check of less is over before a line about it is read.
_TOLD_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class CachedSource:
    """A tokenised source as it lies in the cache. damage: what was wrong with it before it was made again, or ""."""

    folder: Path
    manifest: SourceManifest
    packing: str
    damage: str


def ready_tokenizer(
    cache: Path, config: RunConfig, train: Sequence[WantedSource], report: Report | None
) -> tuple[Path, Tokenizer]:
    """The tokenizer of the config, made where it is not there yet, and its folder."""
    section = config.tokenizer
    if config.data.bos is True and section.kind != "file":
        raise DataError(
            f"data.bos=true: a tokenizer of kind {section.kind} has no bos_token. Leave data.bos out, or "
            "use tokenizer.kind=file."
        )
    if section.kind == "bytes":
        key = key_of("bytes", FORMAT_VERSION)
    elif section.kind == "file":
        source = find_tokenizer_file(section.path)
        settings = source.parent / "tokenizer_config.json"
        files = [source, settings, *([source.parent / "chat_template.jinja"] if section.template else [])]
        content = [path.read_bytes().hex() for path in files if path.is_file()]
        key = key_of("file", FORMAT_VERSION, content, config.data.bos, *(["template"] if section.template else []))
    else:
        # The names decide in which order texts are read.
        texts = [
            [w.key(content_digests(cache, w.files, report)), [file.path.name for file in w.files.files]] for w in train
        ]
        key = key_of("bpe", FORMAT_VERSION, section.vocab_size, section.train_bytes, texts)
    folder = cache / f"tokenizer-{key}"
    with locked(cache / "locks" / f"{folder.name}.lock", _waiting(report, "tokenizer")):
        if folder.is_dir():
            try:
                return folder, Tokenizer.load(folder)
            except DataError:
                # Damaged: it is made again from the same input.
                shutil.rmtree(folder)
        with new_folder(folder) as temporary:
            if section.kind == "bytes":
                save_bytes_tokenizer(temporary)
            elif section.kind == "file":
                import_tokenizer(temporary, section.path, template=section.template, bos=config.data.bos)
            else:
                train_bpe(temporary, _training_text(train, section.train_bytes, report), section.vocab_size)
        return folder, Tokenizer.load(folder)


def _training_text(train: Sequence[WantedSource], limit: int, report: Report | None) -> Iterator[str]:
    """Text of the train split, at most `limit` bytes in equal parts; a small source leaves its rest to the others."""
    sources = [wanted for wanted in sorted(train, key=lambda w: w.files.size_bytes) if wanted.schema.kind != "ids"]
    if not sources:
        raise DataError(
            'tokenizer.kind="bpe": the training data holds only token ids, and no text to train a tokenizer on. '
            'Use tokenizer.kind="file" with the tokenizer that made the ids.'
        )
    left = limit
    for number, wanted in enumerate(sources):
        budget = left // (len(sources) - number)
        for text in _source_text(wanted):
            size = len(content := text.encode())
            if size > budget:
                text = content[:budget].decode("utf-8", "ignore")
                size = budget
            yield text
            budget, left = budget - size, left - size
            if report is not None:
                report("train tokenizer", limit - left, limit)
            if budget <= 0:
                break


def _source_text(wanted: WantedSource) -> Iterator[str]:
    # Files in an order that their names scatter: the first ones of a folder need not be like the rest.
    files = sorted(wanted.files.files, key=lambda file: hashlib.blake2b(file.path.name.encode()).digest())
    for document in wanted.documents(replace(wanted.files, files=tuple(files))):
        if split_of(document, wanted.limits.holdout) == "train":
            parts = (document.prompt, document.text, *(turn.content for turn in document.turns or ()))
            yield "\n".join(part for part in parts if part is not None)


def ready_source(
    cache: Path, wanted: WantedSource, tokenizer: Tokenizer, packing: str | None, seq_len: int, report: Report | None
) -> CachedSource:
    """The tokens of a source, made where they are not there yet or are damaged. packing None: what suits the schema."""
    key = wanted.key(content_digests(cache, wanted.files, report))
    folder = cache / f"data-{key_of(FORMAT_VERSION, tokenizer.digest, key)}"
    with locked(cache / "locks" / f"{folder.name}.lock", _waiting(report, wanted.files.path)):
        manifest, damage = _stored(folder, wanted, report)
        if manifest is None:
            with new_folder(folder) as temporary:
                quarantine = cache / f"{folder.name}.{QUARANTINE}"
                manifest = tokenise_source(
                    wanted.files, wanted.schema, tokenizer, wanted.limits, temporary,
                    report=report, keep_quarantine=quarantine,
                )  # fmt: skip
        broken, limit = Counter(manifest.broken), wanted.limits.max_bad_fraction
        schema = Schema(**manifest.schema)
        if broken.total() > limit * manifest.num_records:
            raise too_many_broken(wanted.files, schema, manifest, limit, folder / QUARANTINE)
        for split, counts in manifest.splits.items():
            if counts.num_documents:
                offsets = SplitReader(folder / split, counts).offsets
                write_plan(folder / split, packing or schema.packing, seq_len, offsets)
    return CachedSource(folder, manifest, packing or schema.packing, damage)


def _stored(folder: Path, wanted: WantedSource, report: Report | None) -> tuple[SourceManifest | None, str]:
    """The manifest of a folder whose files are as they were written, or None with what is wrong with it."""
    if not folder.is_dir():
        return None, ""
    try:
        manifest = SourceManifest.read(folder)
    except (OSError, ValueError, TypeError, KeyError):
        return None, "its manifest cannot be read"
    splits = [(folder / split, counts) for split, counts in manifest.splits.items()]
    problems = [problem for place, counts in splits for problem in size_problems(place, counts)]
    if not problems and not _was_checked(folder, manifest):
        progress: Callable[[int, int], None] | None = None
        if report is not None and sum(size for _, c in splits for size, _ in c.files.values()) > _TOLD_BYTES:
            progress = lambda done, total: report(f"check {wanted.files.path}", done, total)  # noqa: E731
        problems = [problem for place, counts in splits for problem in verify_split(place, counts, progress)]
        if not problems:
            _write_checked(folder, manifest)
    return (None, problems[0]) if problems else (manifest, "")


def _was_checked(folder: Path, manifest: SourceManifest) -> bool:
    """Whether the digests were compared a short while ago, by this process's neighbours or an earlier start."""
    try:
        checked = json.loads((folder / _CHECKED).read_text("utf-8"))
        age = time.time() - float(checked["time"])
        return 0 <= age < _CHECK_HOLDS_S and checked["files"] == _stats(folder, manifest)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _write_checked(folder: Path, manifest: SourceManifest) -> None:
    draft = folder / f".{_CHECKED}.{os.getpid()}"
    draft.write_text(json.dumps({"time": time.time(), "files": _stats(folder, manifest)}), "utf-8")
    os.replace(draft, folder / _CHECKED)


def _stats(folder: Path, manifest: SourceManifest) -> list[list[Any]]:
    """What changes when a file is written to or replaced, for each file of all splits."""
    found: list[list[Any]] = []
    for split, counts in manifest.splits.items():
        for name in sorted(counts.files):
            stat = (folder / split / name).stat()
            found.append([f"{split}/{name}", stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    return found


def _waiting(report: Report | None, what: str) -> Callable[[], None] | None:
    return None if report is None else lambda: report(f"wait for another process to prepare {what}", 0, 0)
