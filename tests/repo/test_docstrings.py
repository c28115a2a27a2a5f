"""Docstrings of public names, and of names that the docs import, have one form.

A function begins with a verb, a property or class with a noun. Errors that a function itself raises are named. Flat
buffers have a dtype and a shape. In the public API, errors are listed in `Raises:`, and more than two parameters in
`Args:`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from tests.repo.source import SOURCE, home, lazy_names, modules, packages, public_names

DOCS = SOURCE.parents[1] / "docs"
Function = ast.FunctionDef | ast.AsyncFunctionDef
PROPERTIES = frozenset({"property", "cached_property"})
#: Decorators of definitions whose docstring is at another definition of the same name.
SECOND = frozenset({"overload", "setter"})
SECTIONS = ("Args:", "Raises:", "Returns:", "Yields:")
FLAT = frozenset({"flat", "flats", "bucket", "buckets"})
DTYPE = re.compile(r"\bdtypes?\b|\b(float|bfloat|int|uint)\d+\b|\bbool\b|\bfp32\b|\bbf16\b|\bbytes\b")
SHAPE = re.compile(r"\bshapes?\b|\([^()]*\w[^()]*,\)|\(\w+(, \w+)+\)|\bnumel\b|\b1-D\b")


@dataclass(frozen=True)
class Item:
    """A public function, or a class with its own docstring."""

    name: str
    node: Function | ast.ClassDef
    text: str | None
    parameters: tuple[str, ...] = ()
    is_function: bool = True
    inherits: bool = False


@cache
def errors() -> frozenset[str]:
    """Return the names of Weft's error classes, and of Python's two for wrong values."""
    bases = {
        node.name: {getattr(base, "id", "") for base in node.bases}
        for tree in modules().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    found = {"WeftError", "ValueError", "TypeError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return frozenset(found)


@cache
def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef)}


def definition(source: str, name: str) -> tuple[str, Function | ast.ClassDef] | None:
    """Return (module, node) of a name that can be imported from `source`, or None for values and modules."""
    module = home(source, name)
    for node in modules().get(module, ast.Module([], [])).body:
        if isinstance(node, Function | ast.ClassDef) and node.name == name and not _decorators(node) & SECOND:
            return module, node
    return None


def items(names: Iterable[tuple[str, str]]) -> Iterator[Item]:
    """Yield the public functions and classes of (module, name), with the classes' public methods."""
    for source, name in names:
        found = definition(source, name)
        if found is None:
            continue
        module, node = found
        if isinstance(node, ast.ClassDef):
            yield from _of_class(module, node)
        else:
            yield _function(f"{module}:{name}", node, bound=False)


def _of_class(module: str, node: ast.ClassDef) -> Iterator[Item]:
    name = f"{module}:{node.name}"
    text = ast.get_docstring(node)
    parameters: tuple[str, ...] = ()
    for member in node.body:
        if not isinstance(member, Function):
            continue
        if member.name == "__init__":
            parameters = _parameters(member, bound=True)
            text = "\n".join(filter(None, [text, ast.get_docstring(member)])) or None
        elif not member.name.startswith("_") and not _decorators(member) & SECOND:
            yield _function(f"{name}.{member.name}", member, bound="staticmethod" not in _decorators(member), of=node)
    yield Item(name, node, text, parameters, is_function=False)


def _function(name: str, node: Function, bound: bool, of: ast.ClassDef | None = None) -> Item:
    is_property = bool(_decorators(node) & PROPERTIES)
    inherits = of is not None and any(node.name in _members(base) for base in _bases(of))
    return Item(name, node, ast.get_docstring(node), _parameters(node, bound), not is_property, inherits)


def _bases(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    for base in node.bases:
        target = base.value if isinstance(base, ast.Subscript) else base
        if (found := classes().get(getattr(target, "id", ""))) is not None and found is not node:
            yield found
            yield from _bases(found)


def _members(node: ast.ClassDef) -> set[str]:
    return {member.name for member in node.body if isinstance(member, Function) and ast.get_docstring(member)}


def _decorators(node: Function | ast.ClassDef) -> set[str]:
    targets = [item.func if isinstance(item, ast.Call) else item for item in node.decorator_list]
    return {getattr(target, "attr", getattr(target, "id", "")) for target in targets}


def _parameters(node: Function, bound: bool) -> tuple[str, ...]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if bound:
        every = every[1:]
    every += [rest for rest in (arguments.vararg, arguments.kwarg) if rest is not None]
    return tuple(argument.arg for argument in every if not argument.arg.startswith("_"))


def section(text: str, title: str) -> str:
    """Return the lines of a section of a docstring, without its title."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.strip() in SECTIONS:
            inside = line.strip() == title
        elif line and not line.startswith(" "):
            inside = False
        elif inside:
            lines.append(line)
    return "\n".join(lines)


def named_in(text: str) -> set[str]:
    """Return the names before the colons of a section; `x, y: ...` names two."""
    heads = re.findall(r"^ {4}((?:\*{0,2}\w+(?:, )?)+):", text, re.MULTILINE)
    return {name.strip(" *") for head in heads for name in head.split(",")}


def raised(node: Function) -> set[str]:
    """Return the error classes that a function itself raises, without errors of inner functions."""
    found: set[str] = set()
    ahead: list[ast.AST] = list(node.body)
    while ahead:
        here = ahead.pop()
        if isinstance(here, Function | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(here, ast.Raise) and here.exc is not None:
            what = here.exc.func if isinstance(here.exc, ast.Call) else here.exc
            found.add(getattr(what, "id", getattr(what, "attr", "")))
        ahead.extend(ast.iter_child_nodes(here))
    return found & errors()


def violations(item: Item, is_api: bool = True) -> Iterator[str]:
    """Yield a message for each rule that the docstring breaks. Internal names need no sections."""
    if not item.text:
        if not item.inherits:
            yield "has no docstring"
        return
    yield from _of_first_line(item)
    named, known = named_in(section(item.text, "Args:")), set(item.parameters)
    if is_api and len(known) > 2 and known - named:
        yield f"Args: lacks {', '.join(sorted(known - named))}"
    if named - known:
        yield f"Args: names {', '.join(sorted(named - known))}, which is no parameter"
    yield from _of_raises(item, is_api)
    if isinstance(item.node, Function) and _is_flat(item.node):
        if not DTYPE.search(item.text):
            yield "says no dtype of the flat buffer"
        if not SHAPE.search(item.text):
            yield "says no shape of the flat buffer"


def _of_first_line(item: Item) -> Iterator[str]:
    first = (item.text or "").splitlines()[0]
    if not first.endswith("."):
        yield f"its first line does not end with a period: {first!r}"
    word = re.match(r"\W*([\w-]*)", first)
    start = word.group(1).lower() if word else ""
    if start in ("returns", "this"):
        yield f"begins with {start!r}"
    elif item.is_function and (start not in VERBS or re.match(r"\w+ of\b", first)):
        yield f"begins with {start!r}, which is no verb of VERBS"


def _of_raises(item: Item, is_api: bool) -> Iterator[str]:
    if is_api and (prose := re.search(r"\bRaises \w+", item.text or "")):
        yield f"says {prose.group()!r} in prose, not in Raises:"
    nodes = (
        [item.node]
        if isinstance(item.node, Function)
        else [member for member in item.node.body if isinstance(member, Function) and member.name == "__init__"]
    )
    for node in nodes:
        named = named_in(section(item.text or "", "Raises:")) | (
            set() if is_api else set(re.findall(r"\w+", item.text or ""))
        )
        if unsaid := raised(node) - named:
            yield f"Raises: lacks {', '.join(sorted(unsaid))}"


def _is_flat(node: Function) -> bool:
    """Return whether a tensor parameter is named as a flat buffer, or the docstring calls a returned tensor flat."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    takes = {argument.arg for argument in every if argument.annotation and "Tensor" in ast.unparse(argument.annotation)}
    gives = node.returns is not None and "Tensor" in ast.unparse(node.returns)
    return bool(takes & FLAT) or (gives and bool(re.search(r"\bflat\b", ast.get_docstring(node) or "")))


#: Verbs that functions may begin with, in the imperative. Add new ones here.
VERBS = frozenset(
    """
    account add answer append apply ask attach attend begin bring build call capture carry change check choose clip
    close combine commit compare compute continue control copy count create cut deal decide declare delete describe
    disconnect divide do download draw drop encode end exchange fill find fit flatten flush forget gather give go hear
    hide hold ignore join judge keep lay leave let line list load look make map measure meet mix move multiply note
    number offer open order parse pick post predict print publish put raise read record refuse remove rename repeat
    replace reset restore resume return run save say scale send serve set show sort start stop sum surround take tell
    tokenise trace train transform treat trust try turn update use verify visit wait warn watch write yield
    """.split()  # noqa: SIM905 (a list of strings is harder to read and to add to)
)


@pytest.mark.parametrize("package", sorted(packages() - {"weft"}))
def test_public_names_have_docstrings_of_one_form(package):
    names = sorted(pair for pair in public_names() if pair[0].rpartition(".")[0] == package)
    api = {(home(of, name), name) for of in packages() for name in lazy_names(of)}
    assert not [
        f"{item.name} {what}" for pair in names for item in items([pair]) for what in violations(item, pair in api)
    ]


def test_names_that_the_docs_import_have_docstrings_of_one_form():
    text = "".join(path.read_text() for path in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"])
    found = re.findall(r"^ *from (weft[\w.]*) import (?:\(\s*([^)]*)\)|(.*))$", text, re.MULTILINE)
    names = [(source, name.strip()) for source, *lists in found for name in ",".join(lists).split(",") if name.strip()]
    assert ("weft.train", "Task") in names
    assert not [f"{item.name} {what}" for item in items(names) for what in violations(item)]


@pytest.mark.parametrize(
    "code, expected",
    [
        ("def f(): ...", "has no docstring"),
        ("def f():\n '''The sum.'''", "begins with 'the'"),
        ("def f():\n '''Returns it.'''", "begins with 'returns'"),
        ("def f():\n '''Sum of all.'''", "begins with 'sum'"),
        ("def f():\n '''Add it\n up.'''", "does not end with a period"),
        ("def f(a, b, *c):\n '''Add.\n\n Args:\n     a, b: numbers.\n '''", "Args: lacks c"),
        ("def f(a):\n '''Add.\n\n Args:\n     b: a number.\n '''", "Args: names b"),
        ("def f():\n '''Add.'''\n raise ConfigError('x')", "Raises: lacks ConfigError"),
        ("def f():\n '''Add. Raises ConfigError.'''", "in prose"),
        ("def f(flat: Tensor):\n '''Add.'''", "no dtype"),
        ("def f():\n '''Add.'''\n def g():\n  raise ConfigError('x')", None),
        ("def f(a, b, *, c=1):\n '''Add.\n\n Args:\n     a: one.\n     b, c: more.\n '''\n", None),
    ],
)
def test_violation_is_found(code, expected):
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.FunctionDef)
    found = list(violations(_function("f", node, bound=False)))
    assert any(expected in what for what in found) if expected else not found
