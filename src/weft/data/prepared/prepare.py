"""Tokenise a run's data once and say where it is: before any process group, by every process, safe under locks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from weft import env
from weft.data.prepared.cached import CachedSource, ready_source, ready_tokenizer
from weft.data.prepared.holdout import settle_holdout
from weft.data.prepared.prepared_data import PreparedData, PreparedSource
from weft.data.prepared.wanted import WantedSource
from weft.data.read import Schema
from weft.data.shards import SplitCounts, SplitReader
from weft.data.tokens import QUARANTINE, Report
from weft.errors import DataError
from weft.spec import RunConfig
from weft.spec.config import DataSection, SourceSection
from weft.units import counted, format_bytes, format_count

#: With fewer documents it is no surprise that one has most tokens.
_MANY_DOCUMENTS = 10
_BLOCK_TOKENS = 2**22


def prepare_data(config: RunConfig, report: Report | None = None, *, preferences: bool = False) -> PreparedData:
    """Tokenise what is not tokenised yet, and open the rest.

    report(stage, done, total) is called as the work goes on; total is in bytes of the files, 0 where it is not known.

    Args:
        config: its sections data and tokenizer.
        report: None: nobody asks.
        preferences: whether records must say which answers are preferred, instead of what is learned.

    Raises:
        DataError: for everything that is wrong with the data.
    """
    data, cache = config.data, cache_folder(config.data)
    holdout = data.holdout if not data.eval else 0.0

    def wanted(sections: Sequence[SourceSection], key: str, holdout: float) -> list[WantedSource]:
        return [
            WantedSource.of(section, f"{key}.{number}", data, holdout, preferences=preferences)
            for number, section in enumerate(sections)
        ]

    train, evaluation = wanted(data.train, "data.train", holdout), wanted(data.eval, "data.eval", 0.0)
    _check_weights(train)
    notes: list[str] = []
    if holdout > 0:
        train, notes = settle_holdout(train)
    try:
        return _prepare(config, cache, train, evaluation, notes, report)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cache}: cannot be used ({error.strerror or error}). "
            "Give a folder with room that you may write to, or set WEFT_HOME."
        ) from error


def _prepare(
    config: RunConfig,
    cache: Path,
    train: list[WantedSource],
    evaluation: list[WantedSource],
    notes: list[str],
    report: Report | None,
) -> PreparedData:
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer_dir, tokenizer = ready_tokenizer(cache, config, train, report)
    summary = [f"tokenizer: {config.tokenizer.kind}, {tokenizer.vocab_size} entries"]

    def ready(wanted: WantedSource) -> tuple[WantedSource, CachedSource]:
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
        summary += [] if notes else [_no_evaluation(config.data)]
        _check_early_stop(config, summary[-1])
    return PreparedData(train_sources, eval_sources, tokenizer_dir, tokenizer.vocab_size, summary)


def cache_folder(data: DataSection) -> Path:
    """Return where tokenised data of this config is kept."""
    return (Path(data.cache_dir).expanduser() if data.cache_dir else env.cache_dir() / "data").absolute()


def _check_weights(train: Sequence[WantedSource]) -> None:
    without = [wanted.files for wanted in train if wanted.section.weight is None]
    if without and len(without) < len(train):
        raise DataError(
            f"{without[0].field}.weight: {without[0].path} has no weight while another source has. "
            "Give every source of data.train a weight, or none."
        )


def _prepared(wanted: WantedSource, stored: CachedSource, split: str) -> PreparedSource:
    manifest = stored.manifest
    return PreparedSource(
        wanted.files.path, stored.folder / split, wanted.section.weight, manifest.pad_id, manifest.end_id,
        manifest.splits[split], stored.packing, wanted.schema.kind,
    )  # fmt: skip


def _describe(wanted: WantedSource, stored: CachedSource, seq_len: int) -> Iterator[str]:
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
            "pieces; a piece does not see the text before it"
        )


def _longest_document(stored: CachedSource) -> tuple[int, int] | None:
    """Trained tokens of the longest document and of all, if it has more than half of those of many documents."""
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
    """Documents of the train split that do not fit into one sequence; their end token need not."""
    offsets = SplitReader(stored.folder / "train", stored.manifest.splits["train"]).offsets
    return int((np.diff(offsets) > seq_len + 1).sum())


def _nothing_left(wanted: WantedSource, stored: CachedSource) -> str:
    field, path = wanted.files.field, wanted.files.path
    if stored.manifest.num_records == 0:
        return f"{field}.path={path}: the files hold no records. Give files with data in them."
    return (
        f"data.holdout={wanted.limits.holdout:g}: it holds out every document of {path} for evaluation. Use a smaller "
        "data.holdout, or give data.eval."
    )


def _no_evaluation(data: DataSection) -> str:
    if data.holdout == 0:
        return "evaluation: none (data.holdout = 0 and no data.eval)"
    return (
        f"evaluation: none; data.holdout={data.holdout:g} takes none of the documents "
        "(a larger data.holdout or data.eval=FILE gives some)"
    )


def _check_early_stop(config: RunConfig, why: str) -> None:
    patience = config.train.early_stop.patience
    if patience is not None:
        raise DataError(
            f"train.early_stop.patience={patience}: the run has no evaluation data ({why}). Give data.eval, or leave "
            "the patience out."
        )
