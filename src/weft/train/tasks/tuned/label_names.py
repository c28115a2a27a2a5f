"""Classes by name: from the task's options, the folder's own config, or the training data."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from weft.errors import ConfigError, Problem
from weft.train.tasks.tuned.class_counts import ordered_labels
from weft.train.tasks.tuned.table_data import TableRecord

_MOST = 10_000


def label_text(record: TableRecord, value: Any, column: str) -> str:
    """Return a label as its name.

    Args:
        record: that it stands in.
        value: what the column holds.
        column: its name.

    Raises:
        DataError: where that is no label.
    """
    if isinstance(value, float) and not value.is_integer():
        record.refuse(
            f"column {column!r} holds the number {value}, and a class is a name or a whole number. To learn numbers, "
            "use task.name=classify_text with task.options.regression=true."
        )
    if isinstance(value, float):
        value = int(value)
    text = str(value).strip() if isinstance(value, str | int) else ""
    if not text:
        shown = json.dumps(value, default=str)[:80]
        record.refuse(f"column {column!r} holds {shown}, and a label belongs there. Leave the record out.")
    return text


def settled_labels(
    option: str, seen: Iterable[str], own: Mapping[Any, str] | None, *, new_head: bool = False
) -> dict[str, Any]:
    """Return the classes in their order, and the number of each label of the data.

    Names are equal if they differ only in case and in what separates their words.

    Args:
        option: names joined by commas; "": none are given.
        seen: the labels of the training data.
        own: `id2label` of the folder's config.
        new_head: whether the folder's head is left out, so that its classes do not count.

    Raises:
        ConfigError: for fewer than two classes, for more than a head may have, and for names other than those of the
            folder's head.
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
        rule = f"there are {len(set(names))} classes ({shown}), and a classifier takes 2 to {_MOST} that differ"
        raise ConfigError([Problem("task.options.labels", f"task.options.labels={option}: {rule}. Name all of them.")])
    if len(known) == len(names) and not option:
        rule = (
            f"the data has the classes {_shown(names)}, and the folder's head {_shown(known)}. Name the data's classes "
            "in the order of the head, or set task.options.new_head=true for a head that starts anew"
        )
        raise ConfigError([Problem("task.options.labels", f"task.options.labels: {rule}.")])
    return {"labels": names, "ids": {name: index for index, name in enumerate(names)}}


def _matched(names: Iterable[str], known: list[str]) -> dict[str, int] | None:
    """The number of each name among the known ones, or None if one is not among them."""
    numbers = {_normal(name): index for index, name in enumerate(known)}
    exact = {name: index for index, name in enumerate(known)}
    if len(numbers) < len(known):  # some known names differ in case alone
        numbers = {}
    found = {name: exact.get(name, numbers.get(_normal(name), -1)) for name in names}
    return None if -1 in found.values() else found


def _normal(name: str) -> str:
    return re.sub(r"[\s_\-]+", " ", unicodedata.normalize("NFKC", name).casefold()).strip()


def _shown(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def label_id(record: TableRecord, name: str, ids: Mapping[str, int]) -> int:
    """Return the number of a label.

    Args:
        record: the record that holds it.
        name: name of the label.
        ids: number of each known name.

    Raises:
        DataError: for another label.
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
    """Return the fields of a config that name the classes."""
    return {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
