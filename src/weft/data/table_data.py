"""Records of data files, and cached rows of arrays that a task makes of them."""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from weft.config.run_config import DataSection, SourceSection
from weft.data.media.files import class_names
from weft.data.order.stream import derive_key
from weft.data.store.prepare import cache_folder
from weft.data.store.prepared import content_digests
from weft.data.store.row_table import RowTable, RowWriter, ready_table
from weft.data.text.records import Broken, RecordReader
from weft.data.text.source import FileSet, find_files
from weft.errors import ConfigError, DataError, Problem, did_you_mean
from weft.units import counted

#: Part of the key of cached rows. A new number invalidates them.
_VERSION = 2
_AT_ONCE = 512
#: With fewer records, none is held out for evaluation.
_FEWEST = 10

Report = Callable[[str, int, int], None]
Rows = Iterator[Mapping[str, np.ndarray]]


@dataclass(frozen=True, slots=True)
class TableRecord:
    """One record of a file: its number in the file, and its values by column name."""

    file: str
    number: int
    values: Mapping[str, Any]

    def refuse(self, rule: str) -> NoReturn:
        """Raise a DataError about this record."""
        raise DataError(f"{self.file}, record {self.number}: {rule}")

    def value(self, column: str, option: str) -> Any:
        """Return the value of a column.

        option: name of the task option that names the column, for the error message.

        Raises:
            DataError: if the record does not have the column.
        """
        if column not in self.values:
            names = sorted(map(str, self.values))
            hint = did_you_mean(column, names)
            self.refuse(
                f"it has no column {column!r}; it has {', '.join(map(repr, names))}.{hint} Give the column's name "
                f"with task.options.{option}=NAME."
            )
        return self.values[column]

    def text(self, column: str, option: str) -> str:
        """Return the text of a column.

        option: name of the task option that names the column, for the error message.

        Raises:
            DataError: if the column is missing, empty or not a text.
        """
        found = self.value(column, option)
        if not isinstance(found, str):
            self.refuse(f"column {column!r} holds {json.dumps(found, default=str)[:80]}, and a text is needed.")
        if not found.strip():
            self.refuse(f"column {column!r} is empty. Leave the record out, or add a text.")
        return found


@dataclass(frozen=True)
class SplitTables:
    """Training and evaluation rows of a run, in folders that are opened on first use.

    Attributes:
        train_folder, eval_folder: the folders; `eval_folder` is None if there are no evaluation rows.
        found: result of the task's survey.
        digests: content digests of the training and the evaluation rows, or None without rows.
        summary: description of both sets, for users.
    """

    train_folder: Path
    eval_folder: Path | None
    found: Mapping[str, Any]
    digests: tuple[str | None, ...]
    summary: tuple[str, ...]

    @cached_property
    def train(self) -> RowTable:
        """Rows for training."""
        return RowTable(self.train_folder)

    @cached_property
    def eval(self) -> RowTable | None:
        """Rows for evaluation, or None."""
        return RowTable(self.eval_folder) if self.eval_folder is not None else None

    def to_json(self) -> str:
        """Return JSON text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1, default=str) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SplitTables:
        """Read the output of `to_json`.

        Raises:
            DataError: if it cannot be read.
        """
        try:
            read = json.loads(text)
            kept = read["eval_folder"]
            return cls(
                Path(read["train_folder"]), Path(kept) if kept else None, dict(read["found"]), tuple(read["digests"]),
                tuple(read["summary"]),
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"rows.json: it cannot be read ({error}). Repeat the weft train command, which rewrites it."
            ) from error


class TableReader:
    """Reads a config's sources for a task, and caches the rows that the task makes of them.

    Args:
        data: the config's [data] section.
        key: JSON values on which the rows depend, in addition to the files.
        rows: turns consecutive records into rows; the second argument is the survey's result.
        survey: reads all training records first, and returns JSON values about them.
        report: called with (stage, done, total) while files are read.
    """

    def __init__(
        self,
        data: DataSection,
        key: Sequence[Any],
        rows: Callable[[list[TableRecord], Mapping[str, Any]], Rows],
        survey: Callable[[Iterator[TableRecord]], Mapping[str, Any]],
        report: Report | None,
    ):
        self._data, self._key, self._rows, self._survey, self._report = data, key, rows, survey, report
        self._summary: list[str] = []

    def tables(self) -> SplitTables:
        """Return the training and evaluation rows. Rows that are not cached are made.

        Without files for evaluation, the share data.holdout of the training records is held out for it.

        Raises:
            DataError: if files are missing or have no records or too many broken ones, if `rows` or `survey` reject a
                record, or if a source has a weight, schema or columns.
        """
        train = self._files("data.train", self._data.train)
        kept = self._files("data.eval", self._data.eval)
        share = 0.0 if kept else self._data.holdout
        trained = self._table("train", train, share)
        evaluated = None
        if kept:
            evaluated = self._table("eval", kept, 0.0, trained.notes)
        elif trained.notes["num_held_out"]:
            evaluated = self._table("held out", train, share, trained.notes)
        elif share:
            self._summary.append("evaluation: none; there are too few records to hold one out (set data.eval)")
        else:
            self._summary.append("evaluation: none (data.holdout=0 and no data.eval)")
        digests = (trained.digest, evaluated.digest if evaluated is not None else None)
        kept = evaluated.folder if evaluated is not None else None
        return SplitTables(trained.folder, kept, trained.notes["found"], digests, tuple(self._summary))

    def _files(self, key: str, sources: Sequence[SourceSection]) -> list[FileSet]:
        for number, source in enumerate(sources):
            usual = SourceSection(path=source.path)
            for name in ("weight", "schema_", "columns"):
                if getattr(source, name) != getattr(usual, name):
                    shown = name.rstrip("_")
                    raise DataError(
                        f"{key}.{number}.{shown}={getattr(source, name)}: this task reads columns that task.options "
                        f"name, of all records once an epoch. Leave {shown} out."
                    )
        return [find_files(source.path, f"{key}.{number}") for number, source in enumerate(sources)]

    def _table(
        self, split: str, sources: list[FileSet], share: float, notes: Mapping[str, Any] | None = None
    ) -> RowTable:
        cache = cache_folder(self._data)
        contents = [content_digests(cache, files, self._report) for files in sources]
        limits = [self._data.max_record_bytes, self._data.max_bad_fraction]
        of_train = None if notes is None else notes.get("found")
        key = ["rows", _VERSION, *self._key, split, contents, limits, share, of_train]

        def write(writer: RowWriter) -> Mapping[str, Any]:
            return self._write(writer, split, sources, share, of_train)

        def waiting() -> None:
            if self._report is not None:
                self._report("wait for another process to prepare the data", 0, 0)

        table = ready_table(cache, key, write, waiting)
        if not len(table):
            names = ", ".join(files.path for files in sources)
            raise DataError(f"data: the files of {names} have no records. Use files with data.")
        bad = f", {counted(table.notes['num_broken'], 'broken record')} left out" if table.notes["num_broken"] else ""
        cut = f", {number} truncated" if (number := table.total("is_cut")) else ""
        names = ", ".join(files.path for files in sources)
        self._summary.append(f"{split}: {names}; {counted(len(table), 'row')}{cut}{bad}")
        return table

    def _write(
        self, writer: RowWriter, split: str, sources: list[FileSet], share: float, found: Mapping[str, Any] | None
    ) -> Mapping[str, Any]:
        draws = array("d")
        if share:
            draws.extend(_draw(record) for record in self._records(sources, []))
        most = _highest_draw(draws, share)
        wants_kept = split == "held out"

        def requested_records(broken: list[str]) -> Iterator[TableRecord]:
            for record in self._records(sources, broken):
                if (bool(share) and _draw(record) <= most) is wants_kept:
                    yield record

        if found is None:
            found = self._survey(requested_records([]))
        broken, chunk = list[str](), list[TableRecord]()
        for record in requested_records(broken):
            chunk.append(record)
            if len(chunk) == _AT_ONCE:
                self._add(writer, chunk, found)
                chunk = []
        self._add(writer, chunk, found)
        number = writer.num_rows + len(broken)
        if len(broken) > self._data.max_bad_fraction * number:
            raise DataError(
                f"data.max_bad_fraction={self._data.max_bad_fraction:g}: {len(broken)} of {number} records cannot be "
                f"read; the first is {broken[0]}. Repair the file, or allow more."
            )
        kept = sum(draw <= most for draw in draws)
        return {"found": dict(found), "num_broken": len(broken), "num_held_out": kept}

    def _add(self, writer: RowWriter, chunk: list[TableRecord], found: Mapping[str, Any]) -> None:
        for row in self._rows(chunk, found) if chunk else ():
            writer.add(row)

    def _records(self, sources: list[FileSet], broken: list[str]) -> Iterator[TableRecord]:
        total, done = sum(files.size_bytes for files in sources), 0
        for files in sources:
            for file in files.files:
                reader = RecordReader(file, max_record_bytes=self._data.max_record_bytes)
                classes = _named_columns(Path(file.path)) if files.format == "parquet" else {}
                for count, record in enumerate(reader):
                    if self._report is not None and not count % 4096:
                        self._report(f"read {files.path}", done + reader.position(), total)
                    if isinstance(record, Broken):
                        broken.append(f"{record.file}, record {record.number}: {record.reason}")
                    else:
                        value = {"text": record.value} if files.format == "text" else record.value
                        if classes:
                            value = {name: _named(one, classes.get(name, ())) for name, one in value.items()}
                        yield TableRecord(record.file, record.number, value)
                done += file.size_bytes


def _named_columns(path: Path) -> dict[str, Sequence[str]]:
    """Return the class names of a parquet file's columns, from the metadata of the datasets library.

    Columns without class names are left out. Return {} if the file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError):
        return {}  # the reader of records refuses the file
    found = {name: class_names(schema.metadata or {}, name) for name in schema.names}
    return {name: names for name, names in found.items() if names}


def _named(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list):
        return [_named(one, names) for one in value]
    is_class = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names)
    return names[value] if is_class else value


def _draw(record: TableRecord) -> float:
    """Return a number from 0 to 1 derived from the record's content, so that equal records are in the same set."""
    return derive_key("held out", json.dumps(dict(record.values), sort_keys=True, default=str)) / 2**64


def _highest_draw(draws: array[float], share: float) -> float:
    """Return the number up to which records are held out by their `_draw`, or -1 to hold out none.

    About a share of the records is held out, and at least one. None is held out if there are fewer than 10 records, or
    if all would be.
    """
    if len(draws) < _FEWEST or not share:
        return -1.0
    ordered = sorted(draws)
    highest = ordered[max(1, round(share * len(ordered))) - 1]
    return highest if highest < ordered[-1] else -1.0


# Classes by name: from the task's options, the folder's config, or the training data.

_MOST = 10_000


def label_text(record: TableRecord, value: Any, column: str) -> str:
    """Return a label as text: a name, or an integer.

    Args:
        record: the record that contains it.
        value: value of the column.
        column: name of the column.

    Raises:
        DataError: if the value is empty, or neither text nor an integer.
    """
    if isinstance(value, float) and not value.is_integer():
        record.refuse(
            f"column {column!r} holds the number {value}, and a class is a name or a whole number. To train on "
            "numbers, use task.name=classify_text with task.options.regression=true."
        )
    if isinstance(value, float):
        value = int(value)
    text = str(value).strip() if isinstance(value, str | int) else ""
    if not text:
        shown = json.dumps(value, default=str)[:80]
        record.refuse(f"column {column!r} holds {shown}, and a label is needed. Leave the record out.")
    return text


def settled_labels(
    option: str, seen: Iterable[str], own: Mapping[Any, str] | None, *, new_head: bool = False
) -> dict[str, Any]:
    """Return "labels", the class names in order, and "ids", the class id of each name.

    Names are the values of `option`, by default the labels in the data. The folder's classes replace them if they
    include all names (with `option`, if there are also as many), or if there is no `option` and all labels are indices
    of the folder's classes. Names are compared with the folder's without case and separators.

    Args:
        option: comma-separated class names, or "".
        seen: the labels in the training data.
        own: `id2label` of the folder's config, or None. Names such as LABEL_0 are ignored.
        new_head: if True, the folder's head is ignored, and so are its classes.

    Raises:
        ConfigError: if there are fewer than two or more than 10,000 classes, or names occur twice; or, without
            `option`, if the data has as many classes as the folder's head, but other names.
    """
    known = [own[key] for key in sorted(own, key=int)] if own and not new_head else []
    if known == [f"LABEL_{index}" for index in range(len(known))]:
        known = []  # transformers' names of classes without names
    found = ordered_labels(list(seen))
    names = [name.strip() for name in option.split(",")] if option else found
    if known and (ids := _matched(names, known)) is not None and (not option or len(names) == len(known)):
        return {"labels": known, "ids": {**ids, **{name: index for index, name in enumerate(known)}}}
    if known and not option and all(name.isdecimal() and int(name) < len(known) for name in found):
        return {"labels": known, "ids": {str(index): index for index in range(len(known))}}
    if not 2 <= len(names) <= _MOST or len(set(names)) != len(names):
        shown = ", ".join(names[:8])
        rule = f"there are {len(set(names))} classes ({shown}), and a classifier needs 2 to {_MOST} that differ"
        raise ConfigError([Problem("task.options.labels", f"task.options.labels={option}: {rule}. Name all of them.")])
    if len(known) == len(names) and not option:
        rule = (
            f"the data has the classes {_shown(names)}, and the folder's head {_shown(known)}. Name the data's "
            "classes in the order of the head, or set task.options.new_head=true for a new head"
        )
        raise ConfigError([Problem("task.options.labels", f"task.options.labels: {rule}.")])
    return {"labels": names, "ids": {name: index for index, name in enumerate(names)}}


def _matched(names: Iterable[str], known: list[str]) -> dict[str, int] | None:
    numbers = {_normal(name): index for index, name in enumerate(known)}
    exact = {name: index for index, name in enumerate(known)}
    if len(numbers) < len(known):  # some names differ only in case
        numbers = {}
    found = {name: exact.get(name, numbers.get(_normal(name), -1)) for name in names}
    return None if -1 in found.values() else found


def _normal(name: str) -> str:
    return re.sub(r"[\s_\-]+", " ", unicodedata.normalize("NFKC", name).casefold()).strip()


def _shown(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def label_id(record: TableRecord, name: str, ids: Mapping[str, int]) -> int:
    """Return the class id of a label. Names may differ in case and separators.

    Args:
        record: the record that contains it.
        name: name of the label.
        ids: id of each class name.

    Raises:
        DataError: if the label is the name of no class, or of several.
    """
    if name in ids:
        return ids[name]
    alike = {index for known, index in ids.items() if _normal(known) == _normal(name)}
    if len(alike) != 1:
        record.refuse(
            f"label {name!r} is not one of the known labels ({_shown(list(ids))}). Correct it, or name all labels with "
            "task.options.labels=FIRST,SECOND."
        )
    return alike.pop()


def label_fields(labels: list[str]) -> dict[str, Any]:
    """Return the config fields (id2label, label2id) that name the classes."""
    return {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}


def ordered_labels(names: Sequence[str]) -> list[str]:
    """Return the distinct labels in order: by value if all are integers, else alphabetically."""
    numbers = all(name.lstrip("-").isdecimal() for name in names)
    return sorted(set(names), key=lambda name: (int(name), name) if numbers else (0, name))
