"""The keys that DeepSpeed knows, as `keys.toml` lists them, and what was probably meant by one that it does not."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import cast

from weft.errors import nearest_name

#: How near a name of another table must be: among hundreds, something is always a little alike.
_ELSEWHERE = 0.85


@dataclass(frozen=True, slots=True)
class Group:
    """Keys of one table that mean the same to Weft; the fields are explained at the top of keys.toml."""

    keys: tuple[str, ...]  # dotted
    outcome: str
    text: str
    target: str = ""
    whole: bool = False
    off: tuple[object, ...] = ()


@functools.cache
def groups() -> tuple[Group, ...]:
    """Every group, in the order of the file."""
    text = resources.files("weft.deepspeed").joinpath("keys.toml").read_text(encoding="utf-8")
    return tuple(_group(table) for table in cast(list[dict[str, object]], tomllib.loads(text)["group"]))


def _group(table: dict[str, object]) -> Group:
    section = str(table.get("section", ""))
    return Group(
        keys=tuple(f"{section}.{name}" if section else name for name in cast(list[str], table["keys"])),
        outcome=str(table["outcome"]),
        text=str(table["text"]),
        target=str(table.get("target", "")),
        whole=bool(table.get("whole", False)),
        off=tuple(cast(list[object], table.get("off", []))),
    )


@functools.cache
def known_keys() -> Mapping[str, Group]:
    """Every key that DeepSpeed knows or knew, dotted, with its group."""
    return {key: group for group in groups() for key in group.keys}


@functools.cache
def sections() -> frozenset[str]:
    """Every dotted name of a table that holds known keys."""
    parents: set[str] = set()
    for key in known_keys():
        while key := key.rpartition(".")[0]:
            parents.add(key)
    return frozenset(parents)


def meant(section: str, name: str) -> str:
    """What was probably meant by an unknown key: ' Did you mean ...?', where it belongs, or ''."""
    every = {*known_keys(), *sections()}
    here = {key.rpartition(".")[2] for key in every if key.rpartition(".")[0] == section}
    alike = next((known for known in sorted(here) if known.lower() == name.lower()), "")
    homes = sorted(key for key in every if key.rpartition(".")[2] == name)
    if not alike and 1 <= len(homes) <= 2:
        return f" Did you mean {' or '.join(repr(home) for home in homes)}?"
    near = alike or nearest_name(name, sorted(here))
    if near:
        return f" Did you mean '{section + '.' if section else ''}{near}'?"
    leaves = {key.rpartition(".")[2]: key for key in sorted(every)}
    near = next(iter(difflib.get_close_matches(name, sorted(leaves), n=1, cutoff=_ELSEWHERE)), "")
    return f" Did you mean '{leaves[near]}'?" if near else ""
