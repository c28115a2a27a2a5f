"""Data preparation: the held-out share, checks of trainability, and tokenization.

Whether a document is held out is a function of its content's hash, so equal documents are in the same split. If there
are few documents, a small share may hold out none.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from weft import env
from weft.config.run_config import DataSection, RunConfig, SourceSection
from weft.data.store.prepared import (
    CachedSource,
    PreparedData,
    PreparedSource,
    RequestedSource,
    ready_source,
    ready_tokenizer,
)
from weft.data.text.documents import ALL_DRAWS
from weft.data.text.schema import Schema
from weft.data.text.source import FileSet
from weft.data.text.tokenize import QUARANTINE, Report, split_of
from weft.data.text.tokenizer import Tokenizer
from weft.data.token_files import SplitCounts, SplitReader
from weft.errors import DataError
from weft.units import counted, format_bytes, format_count

#: With fewer documents, none is held out.
_FEWEST = 10
#: Maximum number of documents to read. With more, a usual share holds out at least one.
_LOOK_AT_DOCUMENTS = 4096
_LOOK_AT_CHARS = 16 * 2**20


@dataclass(slots=True)
class _Look:
    """Counts of the first documents of a source.

    Attributes:
        num_kept: documents that are held out.
        num_trained: documents that are not held out.
        draws: number of documents by hash value (`Document.draw`).
        is_all: whether the counts cover the full source.
    """

    num_kept: int = 0
    num_trained: int = 0
    draws: Counter[int] = field(default_factory=Counter)
    is_all: bool = True

    @property
    def num_documents(self) -> int:
        return self.num_kept + self.num_trained


def resolve_holdout(wanted: Sequence[RequestedSource]) -> tuple[list[RequestedSource], list[str]]:
    """Return the sources with the share of documents to hold out, and notes for the user.

    The first documents of each source are read. If the requested share holds out some but not all of a source, it is
    used for every source. It is also used for a source that is too large to be read completely here. Else, of ten or
    more documents of a source, those with the smallest hashes are held out: as many as requested, at least one. With
    fewer documents, or if too many are equal, none is held out. A share below 0.5 never holds out a source completely.
    """
    looks = [_look(source) for source in wanted]
    has_kept = any(look.num_kept and look.num_trained for look in looks)
    settled, notes = [], []
    for source, look in zip(wanted, looks, strict=True):
        share, note = (source.limits.holdout, "") if has_kept else _share(source, look)
        if look.is_all and look.num_kept and not look.num_trained and source.limits.holdout < 0.5:
            share = 0.0  # a small source among others: the hash of its only document is below the share
        settled.append(replace(source, limits=replace(source.limits, holdout=share)))
        notes += [f"evaluation: {note}"] if note else []
    return settled, notes


def _look(source: RequestedSource) -> _Look:
    look, num_chars = _Look(), 0
    for document in source.documents():
        num_chars += len(document.text or "") + sum(len(turn.content) for turn in document.turns or ())
        num_chars += document.ids.size if document.ids is not None else 0
        if document.part and source.files.format != "text":
            continue  # a later part of a very long record; chunks of a text file are held out separately
        if split_of(document, source.limits.holdout) == "eval":
            look.num_kept += 1
        else:
            look.num_trained += 1
        look.draws[document.draw] += 1
        is_enough = look.num_kept and look.num_trained
        if is_enough or look.num_documents >= _LOOK_AT_DOCUMENTS or num_chars > _LOOK_AT_CHARS:
            look.is_all = False
            break
    return look


def _share(source: RequestedSource, look: _Look) -> tuple[float, str]:
    asked, number = source.limits.holdout, look.num_documents
    if not look.is_all or number == 0 or (look.num_kept and asked >= 0.5):
        return asked, ""
    path, highest, kept = source.files.path, 0, 0
    for highest in sorted(look.draws):
        kept += look.draws[highest]
        if kept >= asked * number:
            break
    if number > 1 and len(look.draws) == 1:
        return 0.0, f"none; the {source.counted(number)} of {path} are all the same, so none can be held out as a test"
    if number < _FEWEST:
        return 0.0, f"none; {path} is {source.counted(number)}, too few to hold one out (data.eval=FILE gives others)"
    if kept > max(number // 4, 2 * asked * number):
        return 0.0, f"none; {kept} of the {source.counted(number)} of {path} are the same (data.eval=FILE gives others)"
    are = "one is" if kept == 1 else f"{kept} are"
    return (highest + 1) / ALL_DRAWS, (
        f"data.holdout={asked:g} takes none of the {source.counted(number)} of {path}, so {are} kept aside"
    )


# Checks before the first step that a run can learn from its data: trained answers, their ends, and truncated answers.

#: Maximum number of documents of a source to check.
_MOST_DOCUMENTS = 200_000
#: Number of tokens that are checked together.
_BLOCK_TOKENS = 2**22
_PREFERENCES = ("preference", "feedback")


@dataclass(slots=True)
class _TrainableCheck:
    """Counts of a source's documents.

    Attributes:
        documents: number of documents that were checked.
        untrained: number of documents without a trained token.
        cut: number of documents that lose a part of their trained tokens.
        has_stop: whether a trained token is a stop token.
    """

    documents: int = 0
    untrained: int = 0
    cut: int = 0
    has_stop: bool = False


def check_trainable(data: PreparedData, section: DataSection, seq_len: int) -> PreparedData:
    """Check that a run can learn from its data, and return the data.

    With data.check=warn, problems are added to its summary. With data.check=off, nothing is checked.

    Args:
        data: the run's data.
        section: the data section, with the checks and limits.
        seq_len: tokens of a sequence.

    Raises:
        DataError: for the first problem, with data.check=refuse.
    """
    if section.check == "off":
        return data
    found = list(_problems(data, section, seq_len))
    if found and section.check == "refuse":
        raise DataError(f"{found[0]} Or set data.check=warn to train all the same.")
    return replace(data, summary=[*data.summary, *(f"warning: {one}" for one in found)])


def _problems(data: PreparedData, section: DataSection, seq_len: int) -> Iterator[str]:
    masked = [(number, source) for number, source in enumerate(data.train) if source.counts.has_mask]
    if not masked:
        return
    tokenizer = data.tokenizer
    yield from _of_template(tokenizer, [source for _, source in masked])
    stops = stop_ids(tokenizer)
    looks = [(number, source, _check_source(source, stops, seq_len)) for number, source in masked]
    if len(masked) == len(data.train) and not any(look.has_stop for _, _, look in looks):
        names = ", ".join(tokenizer.decode([token], specials=True) for token in stops)
        yield (
            f"data.train: no answer ends with a trained stop token ({names}), so the model would never learn to stop. "
            "Use the model's own chat template, or end completions and masks with the stop token."
        )
    for number, source, look in looks:
        key, of = f"data.train.{number}.path={source.name}", f"{look.untrained} of {_documents(look)}"
        if look.untrained > section.max_untrained * look.documents:
            yield (
                f"{key}: {of} have no trained token, more than data.max_untrained={section.max_untrained:g} allows. "
                "Give them answers, leave them out, or set a larger data.max_untrained."
            )
        if look.cut > section.max_cut * look.documents:
            yield (
                f"{key}: train.seq_len={seq_len} cuts answers of {look.cut} of {_documents(look)}, more than "
                f"data.max_cut={section.max_cut:g} allows. Use a larger train.seq_len, or set a larger data.max_cut."
            )


def _documents(look: _TrainableCheck) -> str:
    return counted(look.documents, "document")


def _of_template(tokenizer: Tokenizer, sources: Sequence[PreparedSource]) -> Iterator[str]:
    """Yield a problem if a chat template ends the assistant's turn with text that only resembles a special token."""
    template = tokenizer.template
    if template is None or all(source.kind in ("completion", "ids") for source in sources):
        return
    try:
        after = template.after_answer()
    except DataError:
        return  # the template rejects this conversation, although it rendered the data
    name = after.split()[0] if after.split() else ""
    if name.startswith(("<", "[")) and not template.begins_with_special(name):
        yield (
            f"tokenizer: its chat template ends the assistant's turn with {name!r}, which is no special token of the "
            "tokenizer, so generation cannot stop there. Add the token, or use the model's own template."
        )


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens at which generation stops: the ends of a document and of an assistant's turn."""
    found = {tokenizer.end_id, tokenizer.vocabulary.turn_end_id}
    if tokenizer.template is not None:
        with contextlib.suppress(DataError):  # the template refuses a conversation of one question
            names = tokenizer.template.end_marks()
            special = filter(tokenizer.is_special, range(tokenizer.vocab_size))
            found |= {token for token in special if tokenizer.decode([token], specials=True) in names}
    return sorted(token for token in found if token >= 0)


def _check_source(source: PreparedSource, stops: Sequence[int], seq_len: int) -> _TrainableCheck:
    reader, look = SplitReader(source.folder, source.counts), _TrainableCheck()
    offsets = reader.offsets[: min(source.num_documents, _MOST_DOCUMENTS) + 1]
    first = 0
    while first < len(offsets) - 1:
        border = int(np.searchsorted(offsets, offsets[first] + _BLOCK_TOKENS, side="right")) - 1
        last = max(first + 1, border)
        start, size = int(offsets[first]), int(offsets[last] - offsets[first])
        mask = reader.trained(start, size)
        assert mask is not None
        trained = mask != 0
        _add(look, reader.tokens(start, size), trained, offsets[first : last + 1] - start, stops, seq_len, source)
        first = last
    return look


def _add(
    look: _TrainableCheck,
    tokens: np.ndarray,
    trained: np.ndarray,
    offsets: np.ndarray,
    stops: Sequence[int],
    seq_len: int,
    source: PreparedSource,
) -> None:
    """Add the documents of a block to the counts `look`.

    offsets: start of each document in the block, and the block's end.
    """
    before = np.concatenate([[0], np.cumsum(trained)])
    each = before[offsets[1:]] - before[offsets[:-1]]
    look.documents += len(each)
    look.untrained += int((each == 0).sum())
    look.has_stop = look.has_stop or bool(np.isin(tokens[trained], stops).any())
    longer = np.flatnonzero(np.diff(offsets) - 1 > seq_len)
    if source.packing == "concat":
        return  # with this packing, a split document continues in the next sequence
    for place in longer[each[longer] > 0]:
        begin, end = int(offsets[place]), int(offsets[place + 1])
        where = np.flatnonzero(trained[begin:end])
        # A long preference loses the start of its prompt. Other documents are split, and later parts lack the
        # beginning.
        first = max(0, int(where[0]) - 1) if source.kind in _PREFERENCES else 0
        look.cut += int(where[-1]) - first > seq_len


# Tokenization of a run's data. Every process calls it before a process group exists; file locks let one do the work.

#: With fewer documents, a document that has most of the tokens is not reported.
_MANY_DOCUMENTS = 10


def prepare_data(config: RunConfig, report: Report | None = None, *, preferences: bool = False) -> PreparedData:
    """Tokenise the data that is not in the cache yet, and return all data of a run.

    Args:
        config: a config, of which the sections data and tokenizer are used.
        report: called with (stage, done, total) during the work, or None. `total` is in bytes of the files, or 0 if it
            is unknown.
        preferences: whether the records must be preferences instead of text or answers.

    Raises:
        DataError: for any problem of the data.
    """
    data, cache = config.data, cache_folder(config.data)
    holdout = data.holdout if not data.eval else 0.0

    def requested_sources(sections: Sequence[SourceSection], key: str, holdout: float) -> list[RequestedSource]:
        return [
            RequestedSource.of(section, f"{key}.{number}", data, holdout, preferences=preferences)
            for number, section in enumerate(sections)
        ]

    train, evaluation = (
        requested_sources(data.train, "data.train", holdout),
        requested_sources(data.eval, "data.eval", 0.0),
    )
    without = [wanted.files for wanted in train if wanted.section.weight is None]
    if without and len(without) < len(train):
        raise DataError(
            f"{without[0].field}.weight: {without[0].path} has no weight while another source has. "
            "Give every source of data.train a weight, or none."
        )
    notes: list[str] = []
    every = [wanted.files for wanted in train]
    if data.stream:
        train = [_first_file(wanted) for wanted in train]
    if holdout > 0:
        train, notes = resolve_holdout(train)
    try:
        found = _prepare(config, cache, train, evaluation, notes, report)
        return _with_files(found, train[0], every[0]) if data.stream else found
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cache}: cannot be used ({error.strerror or error}). "
            "Give a folder with room that you may write to, or set WEFT_HOME."
        ) from error


def _prepare(
    config: RunConfig,
    cache: Path,
    train: list[RequestedSource],
    evaluation: list[RequestedSource],
    notes: list[str],
    report: Report | None,
) -> PreparedData:
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer_dir, tokenizer = ready_tokenizer(cache, config, train, report)
    summary = [f"tokenizer: {config.tokenizer.kind}, {tokenizer.vocab_size} entries"]

    def ready(wanted: RequestedSource) -> tuple[RequestedSource, CachedSource]:
        seq_len = config.train.seq_len
        stored = ready_source(cache, wanted, tokenizer, config.data.packing, seq_len, report)
        if stored.manifest.splits["train"].num_documents == 0:
            raise DataError(_nothing_left(wanted, stored))
        summary.extend(_describe(wanted, stored, seq_len))
        return wanted, stored

    trained = [ready(wanted) for wanted in train]
    evaluated = [ready(wanted) for wanted in evaluation]
    train_sources = tuple(_prepared(*entry, "train") for entry in trained)
    if evaluation:
        eval_sources = tuple(_prepared(*entry, "train") for entry in evaluated)
    else:
        eval_sources = tuple(
            _prepared(wanted, stored, "eval")
            for wanted, stored in trained
            if "eval" in stored.manifest.splits and stored.manifest.splits["eval"].num_documents
        )
    summary += notes
    if not eval_sources:
        if not notes:
            share = config.data.holdout
            summary.append(
                f"evaluation: none; data.holdout={share:g} takes none of the documents (a larger data.holdout or "
                "data.eval=FILE gives some)"
                if share
                else "evaluation: none (data.holdout = 0 and no data.eval)"
            )
        if (patience := config.train.early_stop.patience) is not None:
            raise DataError(
                f"train.early_stop.patience={patience}: the run has no evaluation data ({summary[-1]}). Give "
                "data.eval, or leave the patience out."
            )
    return PreparedData(train_sources, eval_sources, tokenizer_dir, tokenizer.vocab_size, summary)


def _first_file(wanted: RequestedSource) -> RequestedSource:
    if wanted.files.format == "text":
        raise DataError(
            f"data.stream=true: the files of {wanted.files.path} are texts, one document each, and a stream reads "
            "files of many records. Use jsonl or parquet, or leave data.stream out."
        )
    return replace(wanted, files=replace(wanted.files, files=wanted.files.files[:1]))


def _with_files(data: PreparedData, first: RequestedSource, every: FileSet) -> PreparedData:
    """Return the data of a stream's first file with the list of all files."""
    # The hub's cache has links to files without a suffix, so links are not resolved.
    files = [[str(Path(file.name).absolute()), file.size_bytes] for file in every.files]
    streamed = {"files": files, "holdout": first.limits.holdout, "schema": first.schema.to_dict()}
    size = f"{counted(len(files), 'file')} and {format_bytes(every.size_bytes)}"
    summary = [*data.summary, f"{every.path}: a stream of {size}, of which the first file is tokenized now"]
    return replace(data, train=(replace(data.train[0], streamed=streamed),), summary=summary)


def cache_folder(data: DataSection) -> Path:
    """Return the folder of tokenised data of this config."""
    return (Path(data.cache_dir).expanduser() if data.cache_dir else env.cache_dir() / "data").absolute()


def _prepared(wanted: RequestedSource, stored: CachedSource, split: str) -> PreparedSource:
    manifest = stored.manifest
    return PreparedSource(
        wanted.files.path, stored.folder / split, wanted.section.weight, manifest.pad_id, manifest.end_id,
        manifest.splits[split], stored.packing, wanted.schema.kind,
    )  # fmt: skip


def _describe(wanted: RequestedSource, stored: CachedSource, seq_len: int) -> Iterator[str]:
    files, manifest, schema = wanted.files, stored.manifest, Schema(**stored.manifest.schema)
    train, kept = manifest.splits["train"], manifest.splits.get("eval")
    counts = _counts(train, schema)
    if train.has_mask and not schema.is_preference:
        counts += f" ({format_count(train.num_trained)} trained)"
    if kept is not None:
        counts += f"; kept for evaluation {_counts(kept, schema)}"
    if not schema.is_preference and (schema.packing != "concat" or stored.packing != "concat"):
        counts += f"; packing {stored.packing}"
    num_files = f"{len(files.files)} files, " if len(files.files) > 1 else ""
    yield f"{files.path}: {schema}; {num_files}{format_bytes(files.size_bytes)}, {counts}"
    if files.num_skipped:
        yield f"{files.path}: {counted(files.num_skipped, 'file')} of other formats left out"
    if stored.damage:
        yield f"{files.path}: its stored tokens were damaged ({stored.damage}), and Weft has written them again"
    if manifest.broken:
        reasons = ", ".join(f"{count} {reason}" for reason, count in manifest.broken.items())
        what = "pieces of text" if schema.file_text else "records"
        yield (
            f"{files.path}: {sum(manifest.broken.values())} of {manifest.num_records} {what} quarantined ({reasons}): "
            f"{stored.folder / QUARANTINE}"
        )
    if (longest := _longest_document(stored)) is not None:
        trained, of = longest
        yield (
            f"{files.path}: one document has {format_count(trained)} of the {format_count(of)} trained tokens; "
            "leave it out if it is there by mistake"
        )
    for note, number in manifest.notes.items():
        yield f"{files.path}: {wanted.counted(number)} {note}, kept for training"
    if (
        schema.has_mask
        and not schema.is_preference
        and stored.packing != "concat"
        and (number := _num_longer(stored, seq_len))
    ):
        yield (
            f"{files.path}: train.seq_len={seq_len} cuts {number} of {counted(train.num_documents, 'document')} into "
            "chunks; a chunk does not attend to the text before it"
        )


def _longest_document(stored: CachedSource) -> tuple[int, int] | None:
    """Return the number of trained tokens of the longest document, and of all documents.

    Return None if the longest document has at most half of the trained tokens, or there are few documents.
    """
    train = stored.manifest.splits["train"]
    if train.num_documents < _MANY_DOCUMENTS:
        return None
    reader = SplitReader(stored.folder / "train", train)
    sizes = np.diff(reader.offsets)
    place = int(sizes.argmax())
    if 2 * sizes[place] <= train.num_trained:
        return None
    start, trained = int(reader.offsets[place]), 0
    for low in range(start, start + int(sizes[place]), _BLOCK_TOKENS):
        size = min(_BLOCK_TOKENS, start + int(sizes[place]) - low)
        mask = reader.trained(low, size)
        trained += size if mask is None else int((mask != 0).sum())
    return (trained, train.num_trained) if 2 * trained > train.num_trained else None


def _counts(split: SplitCounts, schema: Schema) -> str:
    number, noun = split.num_documents, "answer" if schema.is_preference else "document"
    if schema.kind == "preference":
        number, noun = number // 2, "pair"
    return f"{format_count(number)} {noun}{'s' * (number != 1)}, {format_count(split.num_tokens)} tokens"


def _num_longer(stored: CachedSource, seq_len: int) -> int:
    """Return the number of train documents that do not fit into one sequence. The end token is not counted."""
    offsets = SplitReader(stored.folder / "train", stored.manifest.splits["train"]).offsets
    return int((np.diff(offsets) > seq_len + 1).sum())


def _nothing_left(wanted: RequestedSource, stored: CachedSource) -> str:
    field, path = wanted.files.field, wanted.files.path
    if stored.manifest.num_records == 0:
        return f"{field}.path={path}: the files have no records. Use files with data."
    return (
        f"data.holdout={wanted.limits.holdout:g}: it holds out every document of {path} for evaluation. Use a smaller "
        "data.holdout, or give data.eval."
    )
