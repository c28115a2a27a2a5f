"""The planner's rooms hold: few entries, names of others through their doors, nothing private across files."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "weft"
PLANNER = SOURCE / "planner"
DOORS = sorted(path.parent for path in PLANNER.rglob("__init__.py"))
MOST_ENTRIES = 14
#: What stands between the rooms and has no door.
OPEN = {"weft.planner.estimator"}


def name_of(path: Path) -> str:
    return ".".join(("weft", *path.relative_to(SOURCE).with_suffix("").parts))


ROOMS = {name_of(room) for room in DOORS}


def room_of(module: str) -> str:
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return module


@pytest.mark.parametrize("room", DOORS, ids=name_of)
def test_a_room_has_few_entries(room):
    assert len([each for each in room.iterdir() if each.name != "__pycache__"]) <= MOST_ENTRIES


def test_other_rooms_come_through_the_door():
    wrong = []
    for path in SOURCE.rglob("*.py"):
        mine = name_of(path).removesuffix(".__init__")
        home = room_of(mine) if mine.startswith("weft.planner") else ""
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("weft.planner"):
                continue
            there = node.module
            through = there in ROOMS or there in OPEN or room_of(there) == home
            private = [each.name for each in node.names if each.name.startswith("_")]
            if not through or private:
                wrong.append(f"{mine}:{node.lineno}: from {there} import {', '.join(each.name for each in node.names)}")
    assert not wrong


@pytest.mark.parametrize("room", sorted(ROOMS - {"weft.planner"}))
def test_every_name_of_a_door_is_there(room):
    door = importlib.import_module(room)
    for name in door.__all__:
        assert getattr(door, name, None) is not None or importlib.import_module(f"{room}.{name}")
