"""Syntax trees of `weft`'s source, for tests about its structure and language."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "weft"


@cache
def modules() -> Mapping[str, ast.Module]:
    """Return the tree of every module by its dotted name. A package has the tree of its `__init__`."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


@cache
def packages() -> frozenset[str]:
    """Return the dotted names of all packages."""
    folders = {path.parent.relative_to(SOURCE.parent) for path in SOURCE.rglob("*.py")}
    return frozenset(".".join(folder.parts) for folder in folders)


@cache
def imported(module: str) -> list[tuple[str, str]]:
    """Return (source, name) of each `from weft... import` in a module, including those in functions."""
    return [
        (node.module, alias.name)
        for node in ast.walk(modules()[module])
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    ]


@cache
def lazy_names(package: str) -> Mapping[str, str]:
    """Return the module of each public name that a package loads at first use."""
    found = {}
    for node in ast.walk(modules()[package]):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "loads":
            for name, where in ast.literal_eval(node.args[1]).items():
                found[name] = f"{package}{where}" if where.startswith(".") else where
    return found


def home(source: str, name: str) -> str:
    """Return the module that `from source import name` reads.

    For a public package name, it is the module that defines it.
    """
    if f"{source}.{name}" in modules():
        return f"{source}.{name}"
    return lazy_names(source).get(name, source) if source in packages() else source


@cache
def public_names() -> frozenset[tuple[str, str]]:
    """Return (module, name) of names that other packages import, and of packages' public names."""
    found = {(home(package, name), name) for package in packages() for name in lazy_names(package)}
    for module in modules():
        for source, name in imported(module):
            place = home(source, name)
            if place in modules() and place.rpartition(".")[0] != module.rpartition(".")[0]:
                found.add((place, name))
    return frozenset(found)


def cycle_in(graph: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield the modules of one import cycle, if the graph has any."""
    from graphlib import CycleError, TopologicalSorter

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield from error.args[1]
