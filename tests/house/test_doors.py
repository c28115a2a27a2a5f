"""Rooms have doors, and people use them: what is not so yet is listed here with numbers that may only fall.

A room is a folder of the source. Its door is its `__init__`, which names in `__all__` what others may import. An import
from outside a room of a file in it goes past the door. Files of a room import each other as files.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "weft"
MOST_NAMES, MOST_ENTRIES, MOST_ENTRIES_AT_THE_TOP = 16, 14, 24

#: Rooms without a door.
NO_DOOR: frozenset[str] = frozenset({"weft.planner"})
#: Imports that go past the door of a room.
PAST_THE_DOOR: dict[str, int] = {
    "weft.checkpoint": 12,
    "weft.cli": 1,
    "weft.comm": 24,
    "weft.comm.links": 1,
    "weft.comm.wire": 2,
    "weft.data.order": 1,
    "weft.engines": 1,
    "weft.models": 24,
    "weft.monitor": 12,
    "weft.parallel": 12,
    "weft.parallel.placement": 73,
    "weft.parallel.tensor": 3,
    "weft.parallel.zero": 2,
    "weft.planner": 2,
    "weft.spec": 72,
    "weft.spec.rules": 3,
    "weft.spec.schedule": 1,
    "weft.testing": 3,
    "weft.train": 7,
    "weft.train.planned": 1,
    "weft.train.run": 7,
    "weft.train.step": 17,
    "weft.train.tasks": 15,
}
#: Folders with more entries than fit.
CROWDED: dict[str, int] = {
    "weft": 26,
    "weft.cli": 15,
    "weft.parallel.placement": 16,
    "weft.spec": 17,
    "weft.testing": 18,
    "weft.testing.paper": 15,
}
#: File stems that two files have or more; each floor has one `private_torch`, and each command a `__main__`.
STEMS: dict[str, int] = {
    "__main__": 2,
    "build": 2,
    "clock": 3,
    "config": 2,
    "context": 2,
    "decoder": 3,
    "documents": 2,
    "engine": 2,
    "generate": 2,
    "layout": 3,
    "link": 2,
    "live": 2,
    "machine": 2,
    "parts": 2,
    "plan": 2,
    "private_torch": 8,
    "record": 2,
    "report": 2,
    "schedule": 2,
    "shapes": 2,
    "source": 2,
    "verify": 2,
    "watch": 2,
}
#: Public class names that two classes have or more.
CLASSES: dict[str, int] = {
    "Attention": 2,
    "Batches": 2,
    "Block": 3,
    "Clock": 2,
    "Counts": 2,
    "Entry": 2,
    "Job": 2,
    "Join": 2,
    "Line": 3,
    "Link": 2,
    "LiveBytes": 3,
    "Option": 2,
    "Parts": 2,
    "Pass": 2,
    "Recorder": 3,
    "Remedy": 2,
    "Report": 3,
    "Run": 2,
    "Sample": 2,
    "Samples": 2,
    "Site": 2,
    "Step": 2,
    "Subject": 2,
    "Work": 2,
}


@cache
def modules() -> Mapping[str, ast.Module]:
    """Every module's text, as a tree, by its dotted name; a room has the tree of its door."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


@cache
def rooms() -> list[str]:
    """Every folder with code."""
    folders = {path.parent.relative_to(SOURCE.parent) for path in SOURCE.rglob("*.py")}
    return sorted(".".join(folder.parts) for folder in folders)


@cache
def exported(room: str) -> list[str] | None:
    """The names in a room's `__all__`; None where it has none."""
    for node in modules().get(room, ast.Module([], [])).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(getattr(target, "id", "") == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    return None


def past_the_door(room: str) -> Iterator[str]:
    """Imports from outside a room of a file in it, as text."""
    for module in modules():
        if f"{module}.".startswith(f"{room}."):
            continue
        for source, name in imported(module):
            if _is_file_of(room, source, name):
                yield f"{module}: from {source} import {name}"


@cache
def imported(module: str) -> list[tuple[str, str]]:
    """(from what, which name) of each import of a module, inside of functions too."""
    return [
        (node.module, alias.name)
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    ]


def _is_file_of(room: str, source: str, name: str) -> bool:
    """Whether `from source import name` imports a file of the room, or something of a file of it."""
    if source == room:
        return f"{room}.{name}" in modules() and f"{room}.{name}" not in rooms() and name not in (exported(room) or ())
    return source.rpartition(".")[0] == room and source not in rooms()


def expect(found: Mapping[str, int], listed: Mapping[str, int], table: str) -> None:
    """No number above its own in the table; where one has fallen, the table is to say so."""
    more = {name: f"{count}, not {listed.get(name, 0)}" for name, count in found.items() if count > listed.get(name, 0)}
    assert not more, f"more than {table} allows"
    fewer = {name: found.get(name, 0) for name, count in listed.items() if found.get(name, 0) < count}
    assert not fewer, f"well done: lower these in {table}"


@pytest.mark.parametrize("room", rooms())
def test_a_door_is_there_and_thin(room):
    names = exported(room)
    assert (names is None) == (room in NO_DOOR), (
        f"{room} has no `__all__`" if names is None else "strike it off NO_DOOR"
    )
    assert len(names or ()) <= MOST_NAMES, f"{room}: {len(names or ())} names"
    assert len(set(names or ())) == len(names or ())


@pytest.mark.parametrize("room", [room for room in rooms() if exported(room)])
def test_what_a_door_names_is_there(room):
    module = importlib.import_module(room)
    missing = [name for name in exported(room) or () if not hasattr(module, name) and f"{room}.{name}" not in modules()]
    assert not missing, f"{room} names them in `__all__` and imports them from nowhere"


def test_others_come_in_by_the_door():
    found = {room: list(past_the_door(room)) for room in rooms() if room != "weft"}
    for room, imports in found.items():
        if len(imports) > PAST_THE_DOOR.get(room, 0):
            print(*imports, sep="\n")
    expect({room: len(imports) for room, imports in found.items()}, PAST_THE_DOOR, "PAST_THE_DOOR")


def test_folders_are_not_crowded():
    found = {}
    for room in rooms():
        entries = [path.name for path in SOURCE.parent.joinpath(*room.split(".")).iterdir()]
        count = sum(not name.startswith("__") and name != "py.typed" for name in entries)
        if count > (MOST_ENTRIES_AT_THE_TOP if room == "weft" else MOST_ENTRIES):
            found[room] = count
    expect(found, CROWDED, "CROWDED")


def test_a_file_name_stands_for_one_thing():
    stems = Counter(name.rpartition(".")[2] for name in modules() if name not in rooms())
    expect({stem: count for stem, count in stems.items() if count > 1}, STEMS, "STEMS")


def test_a_class_name_stands_for_one_thing():
    homes = defaultdict(set)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(module)
    expect({name: len(found) for name, found in homes.items() if len(found) > 1}, CLASSES, "CLASSES")
