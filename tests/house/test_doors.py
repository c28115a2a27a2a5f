"""Rooms have doors, and people use them; folders, file stems and class names keep to their limits.

A room is a folder of the source. Its door is its `__init__`, which names in `__all__` what others may import. An import
from outside a room of a file in it goes past the door. Files of a room import each other as files.
"""

from __future__ import annotations

import ast
import importlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "weft"
MOST_NAMES, MOST_NAMES_AT_THE_TOP, MOST_ENTRIES, MOST_ENTRIES_AT_THE_TOP = 16, 20, 14, 24

#: File stems that stand for one thing in each place: a floor's private names of torch, and what `python -m` runs.
STEMS = frozenset({"__main__", "private_torch"})


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


def home(source: str, name: str) -> str:
    """The module that `from source import name` is about: behind a door, the one that the door has the name from."""
    if source in rooms() and f"{source}.{name}" in modules() and name not in (exported(source) or ()):
        return f"{source}.{name}"
    behind = {known: inner for inner, known in imported(source)} if source in rooms() else {}
    if name not in behind:
        return source
    return f"{source}.{name}" if behind[name] == source else home(behind[name], name)


def circle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules of which each is imported by the next, from one back to itself; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def _is_file_of(room: str, source: str, name: str) -> bool:
    """Whether `from source import name` imports a file of the room, or something of a file of it."""
    if source == room:
        return f"{room}.{name}" in modules() and f"{room}.{name}" not in rooms() and name not in (exported(room) or ())
    return source.rpartition(".")[0] == room and source not in rooms()


@pytest.mark.parametrize("room", rooms())
def test_a_door_is_there_and_thin(room):
    names = exported(room)
    assert names is not None, f"{room} has no `__all__`"
    assert len(names) <= (MOST_NAMES_AT_THE_TOP if room == "weft" else MOST_NAMES), f"{room}: {len(names)} names"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("room", [room for room in rooms() if exported(room)])
def test_what_a_door_names_is_there(room):
    module = importlib.import_module(room)
    missing = [name for name in exported(room) or () if not hasattr(module, name) and f"{room}.{name}" not in modules()]
    assert not missing, f"{room} names them in `__all__` and imports them from nowhere"


def test_others_come_in_by_the_door():
    assert not [line for room in rooms() if room != "weft" for line in past_the_door(room)]


def test_folders_are_not_crowded():
    found = {}
    for room in rooms():
        entries = [path.name for path in SOURCE.parent.joinpath(*room.split(".")).iterdir()]
        count = sum(not name.startswith("__") and name != "py.typed" for name in entries)
        if count > (MOST_ENTRIES_AT_THE_TOP if room == "weft" else MOST_ENTRIES):
            found[room] = count
    assert not found


def test_a_file_name_stands_for_one_thing():
    stems = Counter(name.rpartition(".")[2] for name in modules() if name not in rooms())
    assert not {stem: count for stem, count in stems.items() if count > 1 and stem not in STEMS}


def test_a_class_name_stands_for_one_thing():
    homes = defaultdict(set)
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(module)
    assert not {name: found for name, found in homes.items() if len(found) > 1}


def test_no_modules_import_in_a_circle():
    graph = {
        module: {home(source, name) for source, name in imported(module)} - {module} - set(rooms())
        for module in modules()
        if module not in rooms()
    }
    assert not circle_in(graph), "a circle, imports for types counted"


def test_a_circle_is_found():
    assert circle_in({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()}) == ["a", "c", "b", "a"]
    assert not circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_a_door_that_loads_late_names_nothing_as_a_file_of_it_is_named():
    """Python sets a file that was imported as an attribute of its room: it would stand in the way of the name."""
    clashes = [
        f"{room}.{name}"
        for room in rooms()
        for source, name in imported(room)
        if source == f"{room}.{name}" and ("weft.lazy", "loads") in imported(room)
    ]
    assert not clashes
