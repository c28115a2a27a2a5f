"""Run the checks and print them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from weft.cli.console import paint
from weft.cli.doctor import gpus, machine, network, software
from weft.cli.doctor.line import CheckLine, examine
from weft.cli.doctor.smoke import TwoRanks
from weft.monitor.screen import tell

#: Columns before a line's text.
_TEXT_COLUMN = 23
_CHECKS = (
    ("software", software.versions),
    ("software", software.namesake),
    ("software", software.torch_build),
    ("machine", machine.system),
    ("machine", machine.processor),
    ("machine", machine.memory),
    ("machine", machine.disks),
    ("machine", machine.limits),
    ("gpus", gpus.gpus),
    ("network", network.loopback),
    ("network", network.interfaces),
    ("network", network.hostname),
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Format the report as Markdown, for a bug report.")
    ] = False,
) -> None:
    """Check this machine. Exit code 0, or 1 where something must be changed before training works.

    The output names no host, no user, no network address and no secret, so that it can be pasted into a bug report.
    """
    lines = report()
    if as_json:
        print(json.dumps({"healthy": _healthy(lines), "lines": [_as_dict(line) for line in lines]}, indent=1))
    elif markdown:
        print(f"```\n{text(lines, plain=True)}\n```")
    else:
        tell(sys.stdout, [text(lines)], indent=_TEXT_COLUMN)
    if not _healthy(lines):
        raise typer.Exit(1)


def report() -> list[CheckLine]:
    """All checks, in the order of the report."""
    two_ranks = TwoRanks()
    try:
        lines = [line for section, check in _CHECKS for line in examine(section, check)]
        lines += examine("network", two_ranks.two_ranks)
        lines += examine("environment", network.variables)
    finally:
        two_ranks.close()
    return lines


def text(lines: Iterable[CheckLine], plain: bool = False) -> str:
    """The report as people read it, grouped by section."""
    rows: list[str] = []
    section = ""
    for line in lines:
        if line.section != section:
            section = line.section
            rows.append(section)
        mark = line.status if plain or line.status == "ok" else paint(line.status, line.status, sys.stdout)
        pad = " " * (4 - len(line.status))
        rows.append(f"  {mark}{pad}  {line.name:<14} {line.text}")
        if line.remedy:
            rows.append(f"{'':<{_TEXT_COLUMN}}-> {line.remedy}")
    return "\n".join(rows)


def _healthy(lines: Iterable[CheckLine]) -> bool:
    return all(line.status != "fail" for line in lines)


def _as_dict(line: CheckLine) -> dict[str, str]:
    return {name: getattr(line, name) for name in ("section", "name", "status", "text", "remedy")}
