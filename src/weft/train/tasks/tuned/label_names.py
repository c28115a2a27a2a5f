"""Classes by name: from the task's options, the folder's own config, or the training data."""

from __future__ import annotations

import json
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


def settled_labels(option: str, seen: Iterable[str], own: Mapping[Any, str] | None) -> dict[str, Any]:
    """Return the classes in their order, and the number that each label of the data stands for.

    Args:
        option: names joined by commas; "": none are given.
        seen: the labels of the training data.
        own: `id2label` of the folder's config.

    Raises:
        ConfigError: for fewer than two classes, and for more than a head may have.
    """
    known = [own[key] for key in sorted(own, key=int)] if own else []
    is_usual = known == [f"LABEL_{index}" for index in range(len(known))]
    found = ordered_labels(list(seen))
    by_number = all(name.isdecimal() and int(name) < len(known) for name in found)
    if option:
        names = [name.strip() for name in option.split(",")]
    elif known and not is_usual and set(found) <= set(known):
        names = known
    elif known and not is_usual and by_number:
        return {"labels": known, "ids": {str(index): index for index in range(len(known))}}
    else:
        names = found
    if not 2 <= len(names) <= _MOST or len(set(names)) != len(names):
        shown = ", ".join(names[:8])
        rule = f"there are {len(set(names))} classes ({shown}), and a classifier takes 2 to {_MOST} that differ"
        raise ConfigError([Problem("task.options.labels", f"task.options.labels={option}: {rule}. Name all of them.")])
    return {"labels": names, "ids": {name: index for index, name in enumerate(names)}}


def label_id(record: TableRecord, name: str, ids: Mapping[str, int]) -> int:
    """Return the number of a label.

    Args:
        record: that it stands in.
        name: of the label.
        ids: of the known ones.

    Raises:
        DataError: for another label.
    """
    if name not in ids:
        shown = ", ".join(list(ids)[:8]) + (", ..." if len(ids) > 8 else "")
        record.refuse(
            f"label {name!r} is not one of the known labels ({shown}). Correct it, or name all labels with "
            "task.options.labels=FIRST,SECOND."
        )
    return ids[name]


def label_fields(labels: list[str]) -> dict[str, Any]:
    """Return the fields of a config that name the classes."""
    return {"id2label": dict(enumerate(labels)), "label2id": {name: index for index, name in enumerate(labels)}}
