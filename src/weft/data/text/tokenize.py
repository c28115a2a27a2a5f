"""Tokenization of one source: files -> records -> documents -> token ids -> shards, in bounded memory."""

from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.text.answer_spans import REASONING_KEYS
from weft.data.text.chat_template import RefusedConversation
from weft.data.text.codec import MarkedText
from weft.data.text.documents import ALL_DRAWS, Document, read_document
from weft.data.text.records import Broken, RecordReader
from weft.data.text.schema import Schema
from weft.data.text.source import FileSet
from weft.data.text.text_windows import TextEncoder
from weft.data.text.tokenizer import Tokenizer
from weft.data.token_files import SHARD_BYTES, SplitCounts, SplitWriter
from weft.errors import DataError

#: Version of the shards' format. It is increased when the same input would give other shards, so that old shards are
#: not used.
FORMAT_VERSION = 5
QUARANTINE = "quarantine.jsonl"
_BATCH_CHARS = 2**20
_BATCH_DOCUMENTS = 2048
_MAX_PIECE_BYTES = 2**20
_MIN_PIECE_BYTES = 256
#: Minimum number of records to which the limit of invalid records is applied, so that one early error is not fatal.
_EARLY_RECORDS = 1000
#: Longer texts are tokenised in chunks: a token id takes eight times the memory of its character.
_LONG_CHARS = 2**21
_NOT_RENDERED = "with reasoning in a field, which only a chat template renders"
#: Maximum number of error texts of a template that are counted separately.
_MAX_REASONS = 20

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits for reading source files, from the data section.

    Attributes:
        holdout: share of documents for the eval split.
        max_record_bytes: longer records count as invalid.
        max_bad_fraction: maximum share of invalid records.
        piece_bytes: bytes per chunk of text files, or 0 to derive it from `holdout`.
    """

    holdout: float
    max_record_bytes: int
    max_bad_fraction: float
    piece_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SourceManifest:
    """Description of a tokenised source. It is written last, so a folder with a manifest is complete.

    `notes` maps a remark about trained documents to the number of documents that it applies to.
    """

    format_version: int
    source: str
    num_files: int
    schema: dict[str, Any]
    tokenizer_digest: str
    vocab_size: int
    end_id: int
    pad_id: int
    num_records: int
    broken: dict[str, int]
    notes: dict[str, int]
    splits: dict[str, SplitCounts]

    def write(self, folder: Path) -> None:
        """Write manifest.json into a folder."""
        values = {**asdict(self), "splits": {name: counts.to_dict() for name, counts in self.splits.items()}}
        (folder / "manifest.json").write_text(json.dumps(values, indent=1) + "\n", "utf-8")

    @classmethod
    def read(cls, folder: Path) -> SourceManifest:
        """Read manifest.json of a folder.

        Raises:
            OSError, ValueError, TypeError, KeyError: if it is missing or damaged.
        """
        values = json.loads((folder / "manifest.json").read_text("utf-8"))
        splits = {name: SplitCounts.from_dict(counts) for name, counts in values["splits"].items()}
        return cls(**{**values, "splits": splits})


def chunk_bytes(files: FileSet, holdout: float) -> int:
    """Choose the chunk size of text files, in bytes. A chunk is completely in the train or in the eval split.

    The size is 1 MiB if there are many files. For few files, it is smaller, so that the eval split gets about 8 chunks.
    """
    wanted = 8 / holdout if holdout > 0 else 0
    if files.format != "text" or len(files.files) >= wanted:
        return _MAX_PIECE_BYTES
    return int(min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, files.size_bytes / wanted)))


def split_of(document: Document, holdout: float) -> str:
    """Return "eval" for a share `holdout` of the documents, else "train". The split depends only on the content."""
    return "eval" if document.draw < holdout * ALL_DRAWS else "train"


class DocumentStream:
    """Iterator over the documents of a source, in stored order. Invalid records are counted.

    Very long texts are yielded in chunks, and a preference pair as two documents.

    Args:
        files: files of the source.
        schema: columns of the records.
        limits: limits on records, and on the share of invalid records.
        vocab_size: records with ids at or above it are rejected.
        on_broken: called with each invalid record.
        report: called with the number of bytes read so far, or None.

    Raises:
        TooManyBroken: during iteration and from other methods, if the share of invalid records is too large.
        DataError: during iteration, if a file cannot be read or has changed.
    """

    def __init__(
        self, files: FileSet, schema: Schema, limits: ReadLimits, vocab_size: int,
        on_broken: Callable[[Broken], None], report: Callable[[int], None] | None = None,
    ):  # fmt: skip
        self._files, self._schema, self._limits, self._vocab_size = files, schema, limits, vocab_size
        self._on_broken, self._report = on_broken, report
        self.num_records = 0
        self.is_complete = False
        self.broken: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Document]:
        done_bytes = 0
        for file in self._files.files:
            reader = RecordReader(
                file,
                max_record_bytes=self._limits.max_record_bytes,
                piece_bytes=self._limits.piece_bytes or chunk_bytes(self._files, self._limits.holdout),
                columns=self._schema.columns,
                on_progress=functools.partial(self._report_position, done_bytes),
            )
            for record in reader:
                document = (
                    record if isinstance(record, Broken) else read_document(record, self._schema, self._vocab_size)
                )
                # A blank text file (an empty __init__.py) is not reported.
                if isinstance(document, Broken) and self._schema.file_text and document.reason == "empty":
                    continue
                self.num_records += 1
                if self.num_records % 64 == 0:
                    self._report_position(done_bytes, reader.position())
                if isinstance(document, Broken):
                    self._count(document)
                else:
                    yield from _in_parts(document)
            done_bytes += file.size_bytes
            self._report_position(done_bytes, 0)
            _check_unchanged(file)
        self.is_complete = True
        self.check()

    def refuse(self, document: Document, reason: str) -> None:
        """Count a document as an invalid record, because the chat template rejects it."""
        if reason not in self.broken and len(self.broken) >= _MAX_REASONS:
            reason = "refused by the chat template"
        said = "\n".join(f"{turn.role}: {turn.content}" for turn in document.turns or ())
        self._count(Broken.of(document.file, document.number, reason, said))

    def check(self) -> None:
        """Raise TooManyBroken if the share of invalid records among all records is too large."""
        self._check_share(self.num_records)

    def _report_position(self, bytes_before: int, position: int) -> None:
        if self._report is not None:
            self._report(bytes_before + position)

    def _count(self, broken: Broken) -> None:
        self.broken[broken.reason] += 1
        self._on_broken(broken)
        self._check_share(max(self.num_records, _EARLY_RECORDS))

    def _check_share(self, out_of: int) -> None:
        num_broken = self.broken.total()
        if num_broken > self._limits.max_bad_fraction * out_of:
            raise TooManyBroken(num_broken, self.num_records)


def _in_parts(document: Document) -> Iterator[Document]:
    """Yield the document, in chunks if its text is very long, or as two documents if it is a pair.

    All of them are in the same split.
    """
    text = document.text
    if text is None or document.prompt is not None or len(text) <= _LONG_CHARS:
        yield document
        if document.other is not None:  # a pair is two consecutive documents in the same split
            yield document.other
        return
    starts = range(0, len(text), _LONG_CHARS // 2)
    for number, start in enumerate(starts):
        is_end = number == len(starts) - 1
        piece = text[start : start + _LONG_CHARS // 2]
        yield replace(document, text=piece, part=document.part + number, last=document.last and is_end)


class TooManyBroken(Exception):
    """Raised by `DocumentStream` and caught by `tokenise_source`, which adds the quarantine file to the error."""


def _check_unchanged(file: Any) -> None:
    try:
        stat = file.path.stat()
    except FileNotFoundError:
        stat = None
    if stat is None or (stat.st_size, stat.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        raise DataError(
            f"{file.name}: the file changed while it was read. Run the command again once no program writes to it."
        )


def tokenise_source(
    files: FileSet, schema: Schema, tokenizer: Tokenizer, limits: ReadLimits, folder: Path,
    *, report: Report | None = None, keep_quarantine: Path, shard_bytes: int = SHARD_BYTES,
) -> SourceManifest:  # fmt: skip
    """Write the shards, the quarantine file and the manifest of one source into the empty `folder`.

    Args:
        files: files of the source.
        schema: columns of the records.
        tokenizer: the tokenizer.
        limits: limits on records, and the share of documents that is held out.
        folder: an empty folder.
        report: called with a title, bytes done and total bytes, or None.
        keep_quarantine: path to which the quarantine file is moved if too many records are invalid.
        shard_bytes: bytes of tokens in one file.

    Raises:
        DataError: if too many records are invalid, a file is damaged or changes, the tokenizer lacks chat tokens, or
            the chat template is unusable.
    """
    if schema.is_chat and not tokenizer.has_chat:
        raise DataError(
            f"{files.field}.path={files.path}: messages need a tokenizer with <|im_start|> and <|im_end|>. "
            'Add them to the tokenizer, or use tokenizer.kind="bpe".'
        )
    title = f"tokenise {files.path}"
    progress = (lambda done: report(title, done, files.size_bytes)) if report is not None else None
    with ExitStack() as opened:
        quarantine = opened.enter_context((folder / QUARANTINE).open("w", encoding="utf-8"))
        stream = DocumentStream(
            files,
            schema,
            limits,
            tokenizer.vocab_size,
            lambda broken: print(json.dumps(asdict(broken)), file=quarantine),
            progress,
        )
        router = _Router(folder, schema, tokenizer, limits.holdout, shard_bytes, opened, stream.refuse)
        if tokenizer.template is not None:
            tokenizer.template.left_out.clear()
        try:
            for batch in _batches(stream):
                router.add(batch)
            stream.check()
        except TooManyBroken as stop:
            quarantine.flush()
            shutil.copyfile(folder / QUARANTINE, keep_quarantine)
            raise too_many_broken(files, schema, stream, limits.max_bad_fraction, keep_quarantine) from stop
        splits = router.close()
    if tokenizer.template is not None:
        router.notes.update(tokenizer.template.left_out)
    manifest = SourceManifest(
        FORMAT_VERSION, files.path, len(files.files), schema.to_dict(), tokenizer.digest, tokenizer.vocab_size,
        tokenizer.end_id, tokenizer.pad_id, stream.num_records, dict(stream.broken.most_common()),
        dict(router.notes.most_common()), splits,
    )  # fmt: skip
    manifest.write(folder)
    return manifest


class _Router:
    """Writes each document to its split. A text file with chunks in several splits becomes several documents.

    Args:
        opened: exit stack that closes the files of the splits, also after an error.
        refuse: called with a document that the chat template rejects, and the reason.
    """

    def __init__(
        self, folder: Path, schema: Schema, tokenizer: Tokenizer, holdout: float, shard_bytes: int, opened: ExitStack,
        refuse: Callable[[Document, str], None],
    ):  # fmt: skip
        names = ("train", "eval") if holdout > 0 else ("train",)
        self._writers = {
            name: opened.enter_context(
                SplitWriter(
                    folder / name, vocab_size=tokenizer.vocab_size, with_mask=schema.has_mask, shard_bytes=shard_bytes
                )
            )
            for name in names
        }
        self._tokenizer, self._holdout, self._refuse = tokenizer, holdout, refuse
        self._open: str | None = None
        self._next = ("", 0)
        #: Encoder of the text whose chunks are being read.
        self._encoder: TextEncoder | None = None
        self._last_id = -1
        self.notes: Counter[str] = Counter()

    def add(self, documents: list[Document]) -> None:
        for document, encoded in self._encoded(documents):
            if document.note:
                self.notes[document.note] += 1
            fields = [turn.more for turn in document.turns or () if turn.role == "assistant" and turn.more]
            if self._tokenizer.template is None and any(f'"{key}":' in one for one in fields for key in REASONING_KEYS):
                self.notes[_NOT_RENDERED] += 1
            split = split_of(document, self._holdout)
            # An invalid chunk between two valid ones also ends the document.
            if self._open is not None and (split, document.file, document.part) != (self._open, *self._next):
                self._end(self._open, end_trained=True)
            ids, trained = (self._chunk_ids(document), None) if encoded is None else encoded
            if document.liking != 1.0 and trained is not None:
                trained = trained * np.float32(document.liking)
            self._append(split, ids, trained)
            self._open, self._next = split, (document.file, document.part + 1)
            if document.last:
                # The end token is trained after texts, and after ids whose last token is trained. A chat ends with its
                # last turn.
                trains_end = document.turns is None and (document.trained is None or bool(document.trained[-1]))
                self._end(split, end_trained=trains_end, liking=document.liking)

    def _encoded(
        self, documents: list[Document]
    ) -> Iterator[tuple[Document, tuple[np.ndarray, np.ndarray | None] | None]]:
        """Yield documents with their ids and weights, or with None for text chunks, which are encoded later.

        If the template rejects one answer of a pair, both are skipped.
        """
        encoded = iter(encode_documents([one for one in documents if not _is_chunk(one)], self._tokenizer))
        remaining = iter(documents)
        for document in remaining:
            if _is_chunk(document):
                yield document, None
                continue
            group: list[tuple[Document, Encoded]] = [(document, next(encoded))]
            if document.other is not None:
                group.append((next(remaining), next(encoded)))
            refusal = next((result for _, result in group if isinstance(result, RefusedConversation)), None)
            if refusal is not None:
                self._refuse(document, refusal.reason)
                continue
            for one, result in group:
                assert not isinstance(result, RefusedConversation)
                yield one, result

    def _chunk_ids(self, document: Document) -> np.ndarray:
        """Return the ids that are final after a chunk of a text. Later calls return the rest."""
        begin = np.zeros(0, np.int64)
        if self._encoder is None:
            self._encoder, begin = self._tokenizer.text_encoder(), self._tokenizer.begin_ids
        return np.concatenate([begin, self._encoder.feed(document.text or "").ids])

    def _append(self, split: str, ids: np.ndarray, trained: np.ndarray | None) -> None:
        self._writers[split].append(ids, trained)
        if ids.size:
            self._last_id = int(ids[-1])

    def _end(self, split: str, *, end_trained: bool, liking: float = 1.0) -> None:
        if self._encoder is not None:
            self._append(split, self._encoder.finish().ids, None)
            self._encoder = None
        writer = self._writers[split]
        # Stored ids may already end with the end token, and a chat template may write it.
        if self._last_id != self._tokenizer.end_id:
            writer.append(np.array([self._tokenizer.end_id]), np.array([liking if end_trained else 0.0], np.float32))
        writer.end_document()
        self._open, self._last_id = None, -1

    def close(self) -> dict[str, SplitCounts]:
        if self._open is not None:
            self._end(self._open, end_trained=True)
        return {name: writer.close() for name, writer in self._writers.items()}


def _is_chunk(document: Document) -> bool:
    return document.text is not None and document.prompt is None and (document.part > 0 or not document.last)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_chars = 0
    for document in documents:
        batch.append(document)
        num_chars += (
            len(document.text or "")
            + len(document.prompt or "")
            + sum(len(turn.content) + len(turn.more) for turn in document.turns or ())
        )
        num_chars += document.ids.size if document.ids is not None else 0
        is_full = num_chars >= _BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS
        if is_full and document.other is None:  # both answers of a pair are in one batch
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def too_many_broken(
    files: FileSet, schema: Schema, read: DocumentStream | SourceManifest, max_bad_fraction: float, listed: Path
) -> DataError:
    """Make the error for a source with too many invalid records.

    Args:
        files: files of the source.
        schema: columns of the records.
        read: counts of all records, or of those that were read before the error.
        max_bad_fraction: the limit.
        listed: path of the quarantine file, which lists the invalid records.
    """
    broken = Counter(read.broken)
    reasons = ", ".join(f"{count} {reason}" for reason, count in broken.most_common(4))
    with listed.open(encoding="utf-8") as lines:
        first = json.loads(next(lines))
    is_all = isinstance(read, SourceManifest) or read.is_complete
    out_of = f"{read.num_records}" if is_all else f"the first {read.num_records}"
    what = "pieces of text" if schema.file_text else "records"
    return DataError(
        f"{files.field}.path={files.path}: {broken.total()} of {out_of} {what} are broken ({reasons}), "
        f"more than data.max_bad_fraction={max_bad_fraction:g} allows; "
        f"the first is {first['file']}:{first['number']}. "
        f"Repair them ({'all' if is_all else 'these'} are in {listed}), or set a larger data.max_bad_fraction."
    )


# Encode documents to token ids: texts, answers after a prompt, and conversations, with a mask of trained tokens.

#: Ids and weights of a document, or the error of the chat template that does not render it.
Encoded = tuple[np.ndarray, np.ndarray | None] | RefusedConversation


def encode_documents(documents: Sequence[Document], tokenizer: Tokenizer) -> list[Encoded]:
    """Return (ids, weights) of each document, without its end token.

    Unless ids are stored, they begin with the tokens that begin a document. Weights are bool or float32, or None if
    all are 1. For a conversation that the chat template rejects, the result is its RefusedConversation.

    Raises:
        DataError: if messages call tools and there is no chat template, or if the template is unusable.
    """
    kinds = [_kind(document) for document in documents]
    by_kind = {kind: [one for one, own in zip(documents, kinds, strict=True) if own == kind] for kind in set(kinds)}
    results: dict[str, Iterator[Encoded]] = {
        "ids": iter([(one.ids, one.trained) for one in by_kind.get("ids", ()) if one.ids is not None]),
        "text": _texts(by_kind.get("text", ()), tokenizer),
        "answer": _answers(by_kind.get("answer", ()), tokenizer),
        "turns": _conversations(by_kind.get("turns", ()), tokenizer),
    }
    return [next(results[kind]) for kind in kinds]


def _kind(document: Document) -> str:
    if document.ids is not None:
        return "ids"
    if document.turns is not None:
        return "turns"
    return "text" if document.prompt is None else "answer"


def _texts(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, None]]:
    for ids in tokenizer.encode_batch([document.text or "" for document in documents]):
        yield np.concatenate([tokenizer.begin_ids, ids]), None


def _answers(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for ids, trained in tokenizer.encode_answers([(one.prompt or "", one.text or "") for one in documents]):
        yield _begun(tokenizer, ids, trained)


def _conversations(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[Encoded]:
    marked = [_marked(document, tokenizer) for document in documents]
    encoded = iter(tokenizer.encode_marked([one for one in marked if isinstance(one, MarkedText)]))
    for one in marked:
        if isinstance(one, RefusedConversation):
            yield one
            continue
        ids, weights = next(encoded)
        # A chat template writes the begin tokens.
        yield (ids, weights) if tokenizer.template is not None else _begun(tokenizer, ids, weights)


def _marked(document: Document, tokenizer: Tokenizer) -> MarkedText | RefusedConversation:
    assert document.turns is not None
    calls = document.tools or any("tool_call" in turn.more for turn in document.turns)
    if calls and tokenizer.template is None:
        raise DataError(
            f"{document.source}: its messages call tools, which needs a chat template, and the tokenizer has none. "
            "Give model.path, or tokenizer.kind=file with tokenizer.template=true, of a model that calls tools."
        )
    try:
        return tokenizer.marked_turns(document.turns, document.tools)
    except RefusedConversation as refusal:
        return refusal
    except DataError as error:
        raise DataError(f"{document.source}: {error}") from error


def _begun(tokenizer: Tokenizer, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    begin = tokenizer.begin_ids
    return np.concatenate([begin, ids]), np.concatenate([np.zeros(len(begin), weights.dtype), weights])
