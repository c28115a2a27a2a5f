"""Which character separates the columns of a csv file, told by its first rows."""

from __future__ import annotations

import csv

DELIMITERS = ",;\t|"
_MAX_ROWS = 50


def comma_or_tab(name: str) -> str:
    """What the name of a file promises: tabs for .tsv, else commas."""
    return "\t" if name.lower().removesuffix(".gz").removesuffix(".zst").endswith(".tsv") else ","


def sniff_delimiter(head: bytes, usual: str) -> str:
    """The delimiter that divides the header into several columns and the most rows into as many.

    head: the first bytes of the file. usual: what it is where nothing speaks for another one.
    """
    lines = head.decode("utf-8-sig", "replace").splitlines(keepends=True)
    if len(lines) > 1 and not lines[-1].endswith("\n"):
        lines.pop()  # cut off
    shares = {delimiter: _share(lines, delimiter) for delimiter in (usual, *DELIMITERS)}
    return max(shares, key=lambda delimiter: (shares[delimiter], delimiter == usual))


def _share(lines: list[str], delimiter: str) -> float:
    """Share of the rows with as many columns as the header; 0 where the header is one column."""
    rows: list[list[str]] = []
    try:
        for row in csv.reader(lines, delimiter=delimiter):
            if row:
                rows.append(row)
            if len(rows) > _MAX_ROWS:
                break
    except csv.Error:
        return 0.0
    if not rows or len(rows[0]) < 2:
        return 0.0
    return sum(len(row) == len(rows[0]) for row in rows) / len(rows)
