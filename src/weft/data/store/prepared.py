"""Tokenised data of a run: its sources, comparison with other data, and the cache of tokenised sources."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from weft.config.run_config import DataSection, RunConfig, SourceSection
from weft.data.order.stream import write_plan
from weft.data.text.documents import Document
from weft.data.text.schema import Schema, detect_schema
from weft.data.text.source import FileSet, find_files
from weft.data.text.tokenize import (
    FORMAT_VERSION,
    QUARANTINE,
    DocumentStream,
    ReadLimits,
    Report,
    SourceManifest,
    chunk_bytes,
    split_of,
    tokenise_source,
    too_many_broken,
)
from weft.data.text.tokenizer import Tokenizer, find_tokenizer_file, import_tokenizer, save_bytes_tokenizer, train_bpe
from weft.data.token_files import SplitCounts, SplitReader, new_folder, size_problems, verify_split
from weft.errors import DataError
from weft.files import locked
from weft.units import counted, format_count


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """One split of one tokenised source.

    Attributes:
        name: path or pattern of the source.
        folder: folder of the shards.
        weight: weight of the source in the mixture, or None to mix sources by their numbers of sequences.
        pad_id: padding token.
        end_id: token that ends a document.
        counts: files and counts of the split.
        packing: packing of documents into sequences.
        kind: kind of its records, as in `Schema`.
        streamed: for data.stream, which tokenises only the first file: [path, bytes] of all files, the holdout and the
            schema of their records, as JSON values.
    """

    name: str
    folder: Path
    weight: float | None
    pad_id: int
    end_id: int
    counts: SplitCounts
    packing: str = "concat"
    kind: str = ""
    streamed: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the split."""
        return self.counts.num_tokens

    @property
    def num_documents(self) -> int:
        """Number of documents in the split."""
        return self.counts.num_documents

    @property
    def content(self) -> str:
        """Digest of the stored tokens, independent of their folder and of the file names."""
        files = sorted((name, digest) for name, (_, digest) in self.counts.files.items())
        names = [[Path(name).name, size] for name, size in self.streamed["files"]] if self.streamed else []
        more = [list(one) for one in (self.counts.weights, names) if one]
        return key_of(files, self.counts.dtype, self.pad_id, self.end_id, *more)

    def __str__(self) -> str:
        documents = counted(self.num_documents, "document")
        return f"{self.name} ({documents}, {format_count(self.num_tokens)} tokens)"


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data of a run.

    Attributes:
        train: the training sources.
        eval: the evaluation sources, which may be empty.
        tokenizer_dir: folder of the tokenizer.
        vocab_size: number of entries of the tokenizer.
        summary: sentences for the user: schemas, counts, quarantined records.
    """

    train: tuple[PreparedSource, ...]
    eval: tuple[PreparedSource, ...]
    tokenizer_dir: Path
    vocab_size: int
    summary: list[str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, read from its folder."""
        return Tokenizer.load(self.tokenizer_dir)

    @property
    def digest(self) -> str:
        """Digest of all tokens and packings. Runs with equal digests and equal settings read equal batches."""
        return key_of(self.vocab_size, [[(s.content, s.packing) for s in split] for split in (self.train, self.eval)])

    def changes_from(self, before: PreparedData) -> list[str]:
        """Return a message for each training source whose tokens or packing differ from `before`.

        Without one, evaluation sources are compared, and then the vocabulary sizes.
        """
        found = _changes("data.train", before.train, self.train) or _changes("data.eval", before.eval, self.eval)
        if not found and before.digest != self.digest:
            found.append(f"tokenizer: it has {self.vocab_size} entries, and {before.vocab_size} before")
        return found

    def to_json(self) -> str:
        """Return the JSON text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PreparedData:
        """Parse the output of `to_json`.

        Raises:
            DataError: if the text is not valid. The message is only the reason, without a file name.
        """
        try:
            values = json.loads(text)
            train, evaluation = (
                tuple(
                    PreparedSource(
                        **{**entry, "folder": Path(entry["folder"]), "counts": SplitCounts.from_dict(entry["counts"])}
                    )
                    for entry in values[split]
                )
                for split in ("train", "eval")
            )
            return cls(train, evaluation, Path(values["tokenizer_dir"]), values["vocab_size"], values["summary"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"it cannot be read: {error}") from error


def _changes(key: str, before: Sequence[PreparedSource], now: Sequence[PreparedSource]) -> list[str]:
    found = []
    for number, (old, new) in enumerate(zip_longest(before, now)):
        if old is None or new is None:
            found.append(f"{key}.{number}: it is {new or 'not there'}, and was {old or 'not there'}")
        elif old.content != new.content:
            same_size = old.num_tokens == new.num_tokens
            found.append(f"{key}.{number}: it is {new}{' with other tokens' if same_size else ''}, and was {old}")
        elif old.packing != new.packing:
            found.append(f"{key}.{number}: its packing is {new.packing}, and data.packing={old.packing} was used")
    return found


def verify_data(prepared: PreparedData) -> list[str]:
    """Read all shards and the tokenizer, compare their digests, and return a message for each damaged file."""
    problems = []
    for source in (*prepared.train, *prepared.eval):
        problems += [f"{source.folder}: {problem}" for problem in verify_split(source.folder, source.counts)]
    try:
        Tokenizer.load(prepared.tokenizer_dir)
    except DataError as error:
        problems.append(str(error))
    return problems


def key_of(*parts: Any) -> str:
    """Return a short digest of JSON values."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=10).hexdigest()


# Data that a config requests: the sources with their files, and digests of the files' content.

_READ_BYTES = 2**20
#: Minimum total size of files for a progress report.
_TOLD_BYTES = 2**28


@dataclass(frozen=True)
class RequestedSource:
    """A source of the config with its files.

    Attributes:
        section: the source's section of the config.
        files: its files.
        limits: limits of its records.
        preferences: whether the task trains on preferences only.
        reasoning: value of data.reasoning.
    """

    section: SourceSection
    files: FileSet
    limits: ReadLimits
    preferences: bool = False
    reasoning: str = "keep"

    @classmethod
    def of(
        cls, section: SourceSection, field: str, data: DataSection, holdout: float, *, preferences: bool = False
    ) -> RequestedSource:
        """Find the files of a source.

        Args:
            section: the source's section of the config.
            field: dotted key, such as "data.train.0".
            data: the data section.
            holdout: share of documents to hold out.
            preferences: whether the task trains on preferences only.

        Raises:
            DataError: as in `find_files`.
        """
        files = find_files(section.path, field, lazy=data.stream and field.startswith("data.train"))
        pieces = chunk_bytes(files, holdout)
        limits = ReadLimits(holdout, data.max_record_bytes, data.max_bad_fraction, pieces)
        return cls(section, files, limits, preferences, data.reasoning)

    @cached_property
    def schema(self) -> Schema:
        columns, most = {**self.section.columns}, self.limits.max_record_bytes
        found = detect_schema(self.files, self.section.schema_, columns, most, preferences=self.preferences)
        if self.reasoning != "keep" and not (found.is_chat or found.is_preference):
            raise DataError(
                f"data.reasoning={self.reasoning}: {self.files.field} is {found}, and only conversations have "
                "reasoning. Leave data.reasoning out."
            )
        return replace(found, reasoning=self.reasoning)

    def counted(self, number: int) -> str:
        """Return a number of documents with the noun for this kind of data, for messages."""
        one, more = ("piece of text", "pieces of text") if self.files.format == "text" else ("document", "documents")
        if self.schema.kind == "preference":
            one, more = "pair", "pairs"
        return counted(number, one, more)

    def documents(self, files: FileSet | None = None) -> Iterator[Document]:
        """Yield all readable documents, whatever their token ids. `files` may give the same files in another order."""
        limits = ReadLimits(
            self.limits.holdout, self.limits.max_record_bytes, max_bad_fraction=1.0, piece_bytes=self.limits.piece_bytes
        )
        yield from DocumentStream(files or self.files, self.schema, limits, 2**31, on_broken=lambda _: None)

    def key(self, digests: list[str]) -> list[Any]:
        """Return the values that determine the tokens of the source, including the digests of its files."""
        limits = self.limits
        reading = [limits.holdout, limits.max_record_bytes, limits.piece_bytes]
        files = [
            [file.format, file.compression, file.path.suffixes[-2:], digest]
            for file, digest in zip(self.files.files, digests, strict=True)
        ]
        options = ["preferences"] if self.preferences else []
        options += [self.reasoning] if self.reasoning != "keep" else []
        return [self.section.schema_, dict(self.section.columns), reading, files, *options]


def content_digests(cache: Path, files: FileSet, report: Report | None) -> list[str]:
    """Return the sha256 of each file.

    Cached digests are used if the path, size and modification time of all files are unchanged. A file that is touched,
    copied or moved is read again and has the same digest.

    Args:
        cache: folder of the cached digests.
        files: the files.
        report: called with (title, bytes read, total bytes) for files of more than 256 MiB together, or None.

    Raises:
        DataError: if a file cannot be read.
    """
    known = (
        cache
        / "contents"
        / (key_of([[str(file.path), file.size_bytes, file.mtime_ns] for file in files.files]) + ".json")
    )
    try:
        digests = json.loads(known.read_text("utf-8"))
        if isinstance(digests, list) and len(digests) == len(files.files):
            return [str(digest) for digest in digests]
    except (OSError, ValueError):
        pass  # the stored digests are missing or damaged, so compute them
    digests, done = [], 0
    for file in files.files:
        digests.append(_digest(file.path, file.name))
        done += file.size_bytes
        if report is not None and files.size_bytes > _TOLD_BYTES:
            report(f"read {files.path}", done, files.size_bytes)
    known.parent.mkdir(parents=True, exist_ok=True)
    draft = known.with_name(f".{known.name}.{os.getpid()}-{threading.get_ident()}")
    draft.write_text(json.dumps(digests), "utf-8")
    os.replace(draft, known)
    return digests


def _digest(path: Path, name: str) -> str:
    hasher = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                hasher.update(block)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error}). Repair it or leave it out.") from error
    return hasher.hexdigest()


# The cache of tokenised data: tokenizers and shards. Each is made once under a lock, and checked on use.

_CHECKED = "checked.json"
#: Seconds for which a digest check is valid if files seem unchanged. A disk may damage data silently.
_CHECK_HOLDS_S = 24 * 3600
#: Minimum total size of shards for a progress report of the check.
_CACHE_LOG_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class CachedSource:
    """A tokenised source in the cache. `damage` describes the damage that caused it to be rewritten, or is ""."""

    folder: Path
    manifest: SourceManifest
    packing: str
    damage: str


def ready_tokenizer(
    cache: Path, config: RunConfig, train: Sequence[RequestedSource], report: Report | None
) -> tuple[Path, Tokenizer]:
    """Return the folder of the config's tokenizer, and the tokenizer. It is created if it is missing or damaged.

    Raises:
        DataError: if data.bos=true does not fit the kind of tokenizer, or the tokenizer cannot be read or trained.
    """
    section, added = config.tokenizer, [["added", *config.tokenizer.add_tokens]] if config.tokenizer.add_tokens else []
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
        key = key_of(
            "file", FORMAT_VERSION, content, config.data.bos, *(["template"] if section.template else []), *added
        )
    else:
        # The file names determine the order in which texts are read.
        texts = [
            [w.key(content_digests(cache, w.files, report)), [file.path.name for file in w.files.files]] for w in train
        ]
        key = key_of("bpe", FORMAT_VERSION, section.vocab_size, section.train_bytes, texts, *added)
    folder = cache / f"tokenizer-{key}"
    with locked(cache / "locks" / f"{folder.name}.lock", _waiting(report, "tokenizer")):
        if folder.is_dir():
            try:
                return folder, Tokenizer.load(folder)
            except DataError:
                # The folder is damaged. It is created again from the same input.
                shutil.rmtree(folder)
        with new_folder(folder) as temporary:
            if section.kind == "bytes":
                save_bytes_tokenizer(temporary)
            elif section.kind == "file":
                options = {"template": section.template, "bos": config.data.bos, "add_tokens": section.add_tokens}
                import_tokenizer(temporary, section.path, **options)
            else:
                sample = _training_text(train, section.train_bytes, report)
                train_bpe(temporary, sample, section.vocab_size, section.add_tokens)
        return folder, Tokenizer.load(folder)


def _training_text(train: Sequence[RequestedSource], limit: int, report: Report | None) -> Iterator[str]:
    """Yield text of the train split, at most `limit` bytes in equal parts.

    If a source has less text than its part, the other sources get more.
    """
    sources = [wanted for wanted in sorted(train, key=lambda w: w.files.size_bytes) if wanted.schema.kind != "ids"]
    if not sources:
        raise DataError(
            'tokenizer.kind="bpe": the training data has only token ids, and no text to train a tokenizer on. Use '
            'tokenizer.kind="file" with the tokenizer of the ids.'
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


def _source_text(wanted: RequestedSource) -> Iterator[str]:
    # Order files by a hash of their names, because the first files of a folder may not be representative.
    files = sorted(wanted.files.files, key=lambda file: hashlib.blake2b(file.path.name.encode()).digest())
    for document in wanted.documents(replace(wanted.files, files=tuple(files))):
        if split_of(document, wanted.limits.holdout) == "train":
            parts = (document.prompt, document.text, *(turn.content for turn in document.turns or ()))
            yield "\n".join(part for part in parts if part is not None)


def ready_source(
    cache: Path, wanted: RequestedSource, tokenizer: Tokenizer, packing: str | None, seq_len: int, report: Report | None
) -> CachedSource:
    """Return a source from the cache. It is tokenised first if the cached tokens are missing or damaged.

    The starts of its sequences are written too. If `packing` is None, the schema determines it.

    Raises:
        DataError: as in `tokenise_source`, also for a cached source with too many invalid records.
    """
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


def _stored(folder: Path, wanted: RequestedSource, report: Report | None) -> tuple[SourceManifest | None, str]:
    """Return the manifest of a folder and "", or None and a description of the damage if a file is damaged or missing.

    If the folder does not exist, return None and "". Digests are computed unless a recent check found no damage.
    """
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
        if report is not None and sum(size for _, c in splits for size, _ in c.files.values()) > _CACHE_LOG_BYTES:
            progress = lambda done, total: report(f"check {wanted.files.path}", done, total)  # noqa: E731
        problems = [problem for place, counts in splits for problem in verify_split(place, counts, progress)]
        if not problems:
            draft = folder / f".{_CHECKED}.{os.getpid()}"
            draft.write_text(json.dumps({"time": time.time(), "files": _stats(folder, manifest)}), "utf-8")
            os.replace(draft, folder / _CHECKED)
    return (None, problems[0]) if problems else (manifest, "")


def _was_checked(folder: Path, manifest: SourceManifest) -> bool:
    """Return True if digests were checked less than `_CHECK_HOLDS_S` ago and the files are unchanged since."""
    try:
        checked = json.loads((folder / _CHECKED).read_text("utf-8"))
        age = time.time() - float(checked["time"])
        return 0 <= age < _CHECK_HOLDS_S and checked["files"] == _stats(folder, manifest)
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _stats(folder: Path, manifest: SourceManifest) -> list[list[Any]]:
    """Return values of each file of all splits that change when it is written to or replaced."""
    found: list[list[Any]] = []
    for split, counts in manifest.splits.items():
        for name in sorted(counts.files):
            stat = (folder / split / name).stat()
            found.append([f"{split}/{name}", stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino])
    return found


def _waiting(report: Report | None, what: str) -> Callable[[], None] | None:
    return None if report is None else lambda: report(f"wait for another process to prepare {what}", 0, 0)
