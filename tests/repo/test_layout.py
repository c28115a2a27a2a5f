"""Layout of the source: two levels of packages, no import cycles, one definition per class name."""

from __future__ import annotations

import importlib
from collections import defaultdict
from graphlib import CycleError

import pytest

from tests.repo.source import SOURCE, cycle_in, home, imported, lazy_names, modules, packages

MAX_LEVELS, MAX_ENTRIES = 2, 34


def test_packages_have_at_most_two_levels():
    assert not [name for name in packages() if name.count(".") > MAX_LEVELS]


def test_packages_have_a_bounded_number_of_entries():
    counts = {}
    for package in packages():
        folder = SOURCE.parent.joinpath(*package.split("."))
        counts[package] = sum(not path.name.startswith("__") and path.name != "py.typed" for path in folder.iterdir())
    assert not {package: count for package, count in counts.items() if count > MAX_ENTRIES}


def test_modules_import_without_cycles():
    graph = {
        module: {home(source, name) for source, name in imported(module)} - {module} - packages()
        for module in modules()
        if module not in packages()
    }
    assert not list(cycle_in(graph)), "type imports count too"


def test_cycle_is_found():
    assert list(cycle_in({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set()})) == ["a", "c", "b", "a"]
    assert not list(cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}))
    assert issubclass(CycleError, ValueError)


def test_class_name_has_one_definition():
    found = defaultdict(set)
    for module, tree in modules().items():
        for node in tree.body:
            if type(node).__name__ == "ClassDef" and not node.name.startswith("_"):
                found[node.name].add(module)
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_modules_import_names_from_the_module_that_defines_them():
    """Only users import through packages. Within Weft each import names the defining module."""
    indirect = [
        f"{module}: from {source} import {name}"
        for module in modules()
        for source, name in imported(module)
        if module not in packages()
        and source in packages()
        and f"{source}.{name}" not in modules()
        and source != "weft"
    ]
    assert not indirect


def test_private_names_stay_in_their_module():
    found = [
        f"{module}: from {source} import {name}"
        for module in modules()
        for source, name in imported(module)
        if source.startswith("weft") and name.startswith("_") and not name.startswith("__")
    ]
    assert not found


@pytest.mark.parametrize("package", sorted(name for name in packages() if lazy_names(name)))
def test_public_names_of_packages_exist(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
