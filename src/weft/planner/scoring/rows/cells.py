"""Numbers from the cells of a row. What is not a number, or one that cannot be, refuses the row."""

from __future__ import annotations

import math
from collections.abc import Mapping

from weft.errors import ConfigError, Problem
from weft.planner.scoring.rows import bandwidths

Row = Mapping[str, str]


def number(row: Row, key: str) -> float | None:
    """A positive number or 0; None where the cell is empty or missing. Raises ConfigError."""
    text = row.get(key, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise refused(row, f"{key}={text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise refused(row, f"{key}={text} must be finite and at least 0")
    return value


def count(row: Row, key: str, default: int) -> int:
    """A whole number; `default` where the cell is empty or missing. Raises ConfigError."""
    value = number(row, key)
    if value is None:
        return default
    if value != int(value):
        raise refused(row, f"{key}={row[key]} is not a whole number")
    return int(value)


def size(row: Row, key: str, default: int = 1) -> int:
    """A whole number of at least 1. Raises ConfigError."""
    value = count(row, key, default)
    if value < 1:
        raise refused(row, f"{key}={value} must be at least 1")
    return value


def in_numbers(row: Row) -> Row:
    """The row with lengths, batches and sizes of memory as plain numbers, however they are written ("8k", "4M tokens",
    "47.6 GB"); what is none of these stays as it is."""
    plain = dict(row)
    length = bandwidths.tokens(row.get("seq_len", ""))
    found = {
        "seq_len": length,
        "global_batch": bandwidths.sequences(row.get("global_batch", ""), length or 1.0),
        "vocab": bandwidths.tokens(row.get("vocab", "")),
        "measured_mem_gib": bandwidths.gibibytes(row.get("measured_mem_gib", "")),
    }
    return plain | {key: repr(value) for key, value in found.items() if value is not None}


def refused(row: Row, reason: str) -> ConfigError:
    """The error of a row that cannot be predicted."""
    return ConfigError([Problem(row.get("id", ""), reason)])
