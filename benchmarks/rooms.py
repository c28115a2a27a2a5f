"""Rooms of the source: entries, lines, names at the door, arrows to other rooms, imports past doors, and circles.

    python benchmarks/rooms.py [FOLDER of weft's source]

A room is a folder. An arrow is a pair of rooms of which the first imports from the second, types included. A circle is
a group of modules that import each other, at whatever point of their text.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path


class Source:
    """The modules of one source tree, and who imports whom."""

    def __init__(self, root: Path):
        self.files = {_dotted(path, root): path for path in sorted(root.rglob("*.py"))}
        self.trees = {name: ast.parse(path.read_text()) for name, path in self.files.items()}
        self.imports = {name: set(self._imported(name)) for name in self.files}

    def room(self, module: str) -> str:
        """The folder that holds a module."""
        return module if self.files[module].name == "__init__.py" else module.rpartition(".")[0]

    def _imported(self, module: str) -> Iterator[str]:
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "weft":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found = inner if inner in self.files else node.module
                    if found in self.files and found != module:
                        yield found

    def door(self, room: str) -> list[str]:
        """The names that the room exports by `__all__`."""
        for node in self.trees[room].body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(getattr(target, "id", "") == "__all__" for target in targets):
                return list(ast.literal_eval(node.value))
        return []

    def circles(self) -> list[list[str]]:
        """Groups of modules that reach each other, doors aside: their names are looked up on first use."""
        graph = {name: {one for one in found if self.room(one) != one} for name, found in self.imports.items()}
        return [group for group in _strong_components(graph) if len(group) > 1]


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(("weft", *parts)).removesuffix(".__init__")


def _strong_components(graph: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm, with the stack of calls kept by hand."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for start in graph:
        if start in index:
            continue
        work: list[tuple[str, Iterator[str]]] = []
        _open(start, graph, index, low, stack, on_stack, work)
        while work:
            node, following = work[-1]
            for other in following:
                if other not in index:
                    _open(other, graph, index, low, stack, on_stack, work)
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    found.append(sorted(stack[cut:]))
                    on_stack.difference_update(stack[cut:])
                    del stack[cut:]
    return found


def _open(
    node: str,
    graph: dict[str, set[str]],
    index: dict[str, int],
    low: dict[str, int],
    stack: list[str],
    on_stack: set[str],
    work: list[tuple[str, Iterator[str]]],
) -> None:
    index[node] = low[node] = len(index)
    stack.append(node)
    on_stack.add(node)
    work.append((node, iter(sorted(graph[node] & graph.keys()))))


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> None:
    """Print one row for each room, and the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1] / "src" / "weft")
    source = Source(parser.parse_args().folder)
    arrows: dict[str, set[str]] = defaultdict(set)
    past: dict[str, int] = defaultdict(int)
    for module, found in source.imports.items():
        here = source.room(module)
        for other in found:
            there = source.room(other)
            if there == here:
                continue
            arrows[here].add(there)
            # Files of a room's own rooms, and what stands beside it, are inside; some doors name a file as a whole.
            named = other.rpartition(".")[2] in source.door(there)
            if other != there and not named and not f"{here}.".startswith(f"{there}."):
                past[there] += 1
    print(f"{'room':32} {'entries':>7} {'lines':>6} {'names':>5} {'arrows':>6} {'past the door':>13}")
    rooms = sorted({source.room(module) for module in source.files})
    for room in rooms:
        folder = source.files[room].parent
        entries = [one for one in folder.iterdir() if one.suffix == ".py" or (one / "__init__.py").exists()]
        lines = _lines(folder.glob("*.py"))
        print(f"{room:32} {len(entries):7} {lines:6} {len(source.door(room)):5} {len(arrows[room]):6} {past[room]:13}")
    circles = source.circles()
    total = _lines(source.files.values())
    print(
        f"{len(rooms)} rooms, {total} lines, {sum(map(len, arrows.values()))} arrows, {sum(past.values())} past doors"
    )
    print(f"{len(circles)} circles of modules: {'; '.join(' '.join(group) for group in circles) or 'none'}")


if __name__ == "__main__":
    main()
