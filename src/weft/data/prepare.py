"""Tokenise a run's data once and say where it is: before any process group, by every process, safe under locks."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from weft import env
from weft.data.bpe import train_bpe
from weft.data.lock import locked, new_folder
from weft.data.packing import write_plan
from weft.data.schema import Schema, detect_schema
from weft.data.shards import SplitCounts, SplitReader, size_problems, verify_split
from weft.data.source import FileSet, find_files
from weft.data.tokenise import (
    FORMAT_VERSION,
    QUARANTINE,
    DocumentStream,
    Manifest,
    ReadLimits,
    Report,
    piece_bytes,
    split_of,
    tokenise_source,
    too_many_broken,
)
from weft.data.tokenizer import Tokenizer, find_tokenizer_file, import_tokenizer, save_bytes_tokenizer
from weft.errors import DataError
from weft.spec.config import DataSection, RunConfig, SourceSection, TokenizerSection
from weft.units import format_bytes, format_count


@dataclass(frozen=True, slots=True)
class PreparedSource:
    """One split of one tokenised source. folder: where its shards are."""

    name: str
    folder: Path
    weight: float | None
    pad_id: int
    end_id: int
    counts: SplitCounts

    @property
    def num_tokens(self) -> int:
        return self.counts.num_tokens

    @property
    def num_documents(self) -> int:
        return self.counts.num_documents


@dataclass(frozen=True)
class PreparedData:
    """Tokenised data of a run. train, eval: the sources; eval is empty where there is nothing to evaluate on.

    summary: sentences for people: which schema was found where, counts, what was quarantined.
    """

    train: tuple[PreparedSource, ...]
    eval: tuple[PreparedSource, ...]
    tokenizer_dir: Path
    vocab_size: int
    summary: list[str]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.tokenizer_dir)

    @property
    def digest(self) -> str:
        """Names the tokenised data and the tokenizer: equal for two preparations that give the same batches."""
        return _key([source.folder.parent.name for source in (*self.train, *self.eval)], self.tokenizer_dir.name)

    def to_json(self) -> str:
        """JSON text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PreparedData:
        """Raises DataError where the text is not one that `to_json` wrote."""
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
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"prepared data: not readable ({error}). Prepare the data again.") from error


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A source of the config with its files. place: dotted key, such as "data.train.0"."""

    section: SourceSection
    files: FileSet
    limits: ReadLimits

    @property
    def schema(self) -> Schema:
        return detect_schema(self.files, self.section.schema_, self.section.columns, self.limits.max_record_bytes)


def prepare_data(config: RunConfig, report: Report | None = None) -> PreparedData:
    """Tokenise what is not tokenised yet, and open the rest.

    report(stage, done, total) is called as the work goes on; total is in bytes of the files, 0 where it is not known.
    Raises DataError for everything that is wrong with the data.
    """
    data, cache = config.data, cache_folder(config.data)
    holdout = data.holdout if not data.eval else 0.0
    train = [_wanted(section, f"data.train.{n}", data, holdout) for n, section in enumerate(data.train)]
    evaluation = [_wanted(section, f"data.eval.{n}", data, 0.0) for n, section in enumerate(data.eval)]
    _check_weights(train)
    try:
        return _prepare(config, cache, train, evaluation, report)
    except OSError as error:
        raise DataError(
            f"data.cache_dir={cache}: cannot be used ({error.strerror or error}). "
            "Give a folder with room that you may write to, or set WEFT_HOME."
        ) from error


def _prepare(
    config: RunConfig, cache: Path, train: list[_Wanted], evaluation: list[_Wanted], report: Report | None
) -> PreparedData:
    holdout = train[0].limits.holdout
    cache.mkdir(parents=True, exist_ok=True)
    tokenizer_dir, tokenizer = _ready_tokenizer(cache, config.tokenizer, train, report)
    summary = [f"tokenizer: {config.tokenizer.kind}, {tokenizer.vocab_size} entries"]
    seq_len, packing = config.train.seq_len, config.data.packing

    def ready(wanted: _Wanted) -> tuple[Path, Manifest]:
        folder, manifest = _ready_source(cache, wanted, tokenizer, packing, seq_len, report)
        summary.extend(_describe(wanted.files, folder, manifest))
        return folder, manifest

    trained = [(wanted, *ready(wanted)) for wanted in train]
    evaluated = [(wanted, *ready(wanted)) for wanted in evaluation]
    for wanted, _, manifest in [*trained, *evaluated]:
        if manifest.splits["train"].num_documents == 0:
            raise DataError(_nothing_left(wanted, manifest))
    train_sources = tuple(_prepared(*entry, "train") for entry in trained)
    if evaluation:
        eval_sources = tuple(_prepared(*entry, "train") for entry in evaluated)
    elif holdout > 0:
        eval_sources = tuple(_prepared(*entry, "eval") for entry in trained if entry[2].splits["eval"].num_documents)
        if not eval_sources:
            raise DataError(_nothing_kept(holdout, [manifest for _, _, manifest in trained]))
    else:
        eval_sources = ()
        summary.append("evaluation: none (data.holdout = 0 and no data.eval)")
    return PreparedData(train_sources, eval_sources, tokenizer_dir, tokenizer.vocab_size, summary)


def verify_data(prepared: PreparedData) -> list[str]:
    """Read all shards and compare their digests; one sentence for each damaged file."""
    problems = []
    for source in (*prepared.train, *prepared.eval):
        problems += [f"{source.folder}: {problem}" for problem in verify_split(source.folder, source.counts)]
    try:
        Tokenizer.load(prepared.tokenizer_dir)
    except DataError as error:
        problems.append(str(error))
    return problems


def cache_folder(data: DataSection) -> Path:
    """Where tokenised data of this config is kept."""
    return (Path(data.cache_dir).expanduser() if data.cache_dir else env.cache_dir() / "data").absolute()


def _wanted(section: SourceSection, field: str, data: DataSection, holdout: float) -> _Wanted:
    limits = ReadLimits(holdout, data.max_record_bytes, data.max_bad_fraction)
    return _Wanted(section, find_files(section.path, field), limits)


def _check_weights(train: Sequence[_Wanted]) -> None:
    without = [wanted.files for wanted in train if wanted.section.weight is None]
    if without and len(without) < len(train):
        raise DataError(
            f"{without[0].field}.weight: {without[0].path} has no weight while another source has. "
            "Give every source of data.train a weight, or none."
        )


def _ready_tokenizer(
    cache: Path, section: TokenizerSection, train: Sequence[_Wanted], report: Report | None
) -> tuple[Path, Tokenizer]:
    if section.kind == "bytes":
        key = _key("bytes", FORMAT_VERSION)
    elif section.kind == "file":
        source = find_tokenizer_file(section.path)
        settings = source.parent / "tokenizer_config.json"
        content = [path.read_bytes().hex() for path in (source, settings) if path.is_file()]
        key = _key("file", FORMAT_VERSION, content)
    else:
        key = _key("bpe", FORMAT_VERSION, section.vocab_size, section.train_bytes, [_source_key(w) for w in train])
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
                import_tokenizer(temporary, section.path)
            else:
                train_bpe(temporary, _training_text(train, section.train_bytes, report), section.vocab_size)
        return folder, Tokenizer.load(folder)


def _training_text(train: Sequence[_Wanted], limit: int, report: Report | None) -> Iterator[str]:
    """Text of the train split, at most `limit` bytes in equal parts; a small source leaves its rest to the others."""
    sources = sorted(((wanted, wanted.schema) for wanted in train), key=lambda pair: pair[0].files.size_bytes)
    sources = [pair for pair in sources if pair[1].kind != "ids"]
    if not sources:
        raise DataError(
            'tokenizer.kind="bpe": the training data holds only token ids, and no text to train a tokenizer on. '
            'Use tokenizer.kind="file" with the tokenizer that made the ids.'
        )
    left = limit
    for number, (wanted, schema) in enumerate(sources):
        budget = left // (len(sources) - number)
        for text in _source_text(wanted, schema):
            size = len(text.encode())
            if size > budget:
                text = text.encode()[:budget].decode("utf-8", "ignore")
                size = budget
            yield text
            budget, left = budget - size, left - size
            if report is not None:
                report("train tokenizer", limit - left, limit)
            if budget <= 0:
                break


def _source_text(wanted: _Wanted, schema: Schema) -> Iterator[str]:
    # Files in an order that their names scatter: the first ones of a folder need not be like the rest.
    files = sorted(wanted.files.files, key=lambda file: hashlib.blake2b(file.path.name.encode()).digest())
    scattered = FileSet(wanted.files.field, wanted.files.path, wanted.files.format, tuple(files))
    limits = ReadLimits(wanted.limits.holdout, wanted.limits.max_record_bytes, max_bad_fraction=1.0)
    for document in DocumentStream(scattered, schema, limits, 0, on_broken=lambda _: None):
        if split_of(document, wanted.limits.holdout) == "train":
            yield document.text if document.text is not None else "\n".join(c for _, c in document.turns or ())


def _ready_source(
    cache: Path, wanted: _Wanted, tokenizer: Tokenizer, packing: str, seq_len: int, report: Report | None
) -> tuple[Path, Manifest]:
    folder = cache / f"data-{_key(FORMAT_VERSION, tokenizer.digest, _source_key(wanted))}"
    with locked(cache / "locks" / f"{folder.name}.lock", _waiting(report, wanted.files.path)):
        manifest = _complete_manifest(folder)
        if manifest is None:
            with new_folder(folder) as temporary:
                quarantine = cache / f"{folder.name}.{QUARANTINE}"
                manifest = tokenise_source(
                    wanted.files, wanted.schema, tokenizer, wanted.limits, temporary,
                    report=report, keep_quarantine=quarantine,
                )  # fmt: skip
        broken = Counter(manifest.broken)
        if broken.total() > wanted.limits.max_bad_fraction * manifest.num_records:
            limit = wanted.limits.max_bad_fraction
            raise too_many_broken(wanted.files, broken, manifest.num_records, limit, folder / QUARANTINE)
        for split, counts in manifest.splits.items():
            if counts.num_documents:
                write_plan(folder / split, packing, seq_len, SplitReader(folder / split, counts).offsets)
    return folder, manifest


def _complete_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder whose files are all there in full size, or None: then it is made again."""
    try:
        manifest = Manifest.read(folder)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    whole = not any(size_problems(folder / split, counts) for split, counts in manifest.splits.items())
    return manifest if whole else None


def _source_key(wanted: _Wanted) -> list[Any]:
    section, limits = wanted.section, wanted.limits
    files = [[str(file.path), file.size_bytes, file.mtime_ns] for file in wanted.files.files]
    reading = [limits.holdout, limits.max_record_bytes, piece_bytes(wanted.files, limits.holdout)]
    return [section.schema_, dict(section.columns), reading, files]


def _key(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=10).hexdigest()


def _waiting(report: Report | None, what: str) -> Callable[[], None] | None:
    return None if report is None else lambda: report(f"wait for another process to prepare {what}", 0, 0)


def _prepared(wanted: _Wanted, folder: Path, manifest: Manifest, split: str) -> PreparedSource:
    counts = manifest.splits[split]
    return PreparedSource(
        wanted.files.path, folder / split, wanted.section.weight, manifest.pad_id, manifest.end_id, counts
    )


def _describe(files: FileSet, folder: Path, manifest: Manifest) -> list[str]:
    train, kept = manifest.splits["train"], manifest.splits.get("eval")
    counts = f"{format_count(train.num_documents)} documents, {format_count(train.num_tokens)} tokens"
    if train.has_mask:
        counts += f" ({format_count(train.num_trained)} trained)"
    if kept is not None:
        aside = f"{format_count(kept.num_documents)} documents, {format_count(kept.num_tokens)} tokens"
        counts += f"; kept for evaluation {aside}"
    num_files = f"{len(files.files)} files, " if len(files.files) > 1 else ""
    lines = [f"{files.path}: {Schema(**manifest.schema)}; {num_files}{format_bytes(files.size_bytes)}, {counts}"]
    if files.num_skipped:
        lines.append(f"{files.path}: {files.num_skipped} files of other kinds are left out")
    if manifest.broken:
        reasons = ", ".join(f"{count} {reason}" for reason, count in manifest.broken.items())
        lines.append(
            f"{files.path}: {sum(manifest.broken.values())} of {manifest.num_records} records quarantined ({reasons}): "
            f"{folder / QUARANTINE}"
        )
    return lines


def _nothing_left(wanted: _Wanted, manifest: Manifest) -> str:
    field, path = wanted.files.field, wanted.files.path
    if manifest.num_records == 0:
        return f"{field}.path={path}: the files hold no records. Give files with data in them."
    return (
        f"data.holdout={wanted.limits.holdout:g}: it keeps every document of {path} for evaluation. "
        "Use a smaller data.holdout, or give data.eval."
    )


def _nothing_kept(holdout: float, manifests: Sequence[Manifest]) -> str:
    num_documents = sum(manifest.splits["train"].num_documents for manifest in manifests)
    enough = (min(manifest.smallest_draw for manifest in manifests) + 1) / 2**32
    enough = min(0.99, int(enough * 1000 + 1) / 1000)
    return (
        f"data.holdout={holdout:g}: none of the {num_documents} documents falls into that share. "
        f"Use data.holdout={enough:g} or more, give data.eval, or use data.holdout=0 for no evaluation."
    )


__all__ = ["PreparedData", "PreparedSource", "cache_folder", "prepare_data", "verify_data"]
