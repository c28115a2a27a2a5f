"""Rendering of chat templates in jinja2's sandbox, with limits on work and size.

The environment has the filters, globals and the `generation` block that transformers gives to chat templates. A
template from a downloaded folder is untrusted: loops and calls are counted, and operations whose result could be much
larger than their operands are checked before they run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any, NamedTuple

import jinja2
from jinja2 import ext, nodes, sandbox

_MAX_SOURCE_CHARS = 2**20
_MAX_STEPS = 300_000
#: Base-2 logarithm of the number of copied characters that count as one step.
_COPY_BITS = 12
#: Maximum characters or elements of a value: a fixed number, and some per character of the conversation.
_MIN_SIZE, _SIZE_PER_CHAR = 2**22, 32
_MAX_INT_BITS = 4096
_MAX_TERMS = 500
#: Largest integer that a template may pass to a filter or a method, such as a width.
_MAX_ARGUMENT = 10_000
_MAX_INDENT = 64
_CONTAINERS = (list, tuple, dict, set, frozenset)
_SIZED = (str, *_CONTAINERS)
#: Filters of jinja2 that chat templates do not need and whose result is not bounded by their input.
_REMOVED_FILTERS = (
    "batch", "center", "filesizeformat", "pprint", "random", "slice", "striptags", "urlencode", "urlize", "wordwrap",
    "xmlattr",
)  # fmt: skip
_REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")
_REMOVED_METHODS = ("translate", "maketrans", "expandtabs", "format_map", "encode")
_DICT_NAMES = frozenset(dir(dict))
_TEXT_METHODS = frozenset(("endswith", "lstrip", "replace", "rstrip", "split", "startswith", "strip"))
#: A width or precision of five digits or more, or one that is computed from an argument.
_WIDE_FORMAT = re.compile(r"\d{5}|%[^%a-zA-Z]*\*|\{[^{}]*\{")
_WORK = "does more work than a conversation needs"
_SIZE = "makes a value larger than a conversation needs"


class TemplateLimit(jinja2.TemplateError):
    """Raised if a template exceeds a limit."""


class Rendered(NamedTuple):
    """The text of a conversation, and the ranges of characters in `generation` blocks."""

    text: str
    generated: list[tuple[int, int]]


class _Budget:
    """Remaining steps of one rendering, and the maximum size of a value."""

    __slots__ = ("blocks", "generated", "max_size", "steps")

    def __init__(self, input_chars: int = 0):
        self.max_size = _MIN_SIZE + _SIZE_PER_CHAR * input_chars
        self.steps = _MAX_STEPS + input_chars
        self.blocks: list[str] = []
        self.generated: list[tuple[int, int]] = []

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise TemplateLimit(_WORK)

    def check_size(self, size: int) -> None:
        if size > self.max_size:
            raise TemplateLimit(_SIZE)

    def copy(self, size: int) -> None:
        """Check the size of a new text or list, and count the work of creating it."""
        if size >> _COPY_BITS:
            self.check_size(size)
            self.spend(size >> _COPY_BITS)


#: Budget of the current rendering or compilation. `_current` sets a missing one.
_budget: ContextVar[_Budget] = ContextVar("budget")


def _current() -> _Budget:
    found = _budget.get(None)
    if found is None:
        found = _Budget()
        _budget.set(found)
    return found


class Sandbox:
    """A compiled chat template, rendered with limits.

    Raises:
        jinja2.TemplateError, RecursionError, ValueError, OverflowError: if it cannot be compiled.
    """

    def __init__(self, source: str):
        if len(source) > _MAX_SOURCE_CHARS:
            raise TemplateLimit(f"is longer than {_MAX_SOURCE_CHARS} characters")
        token = _budget.set(_Budget(len(source)))
        try:
            environment = _Environment()
            tree = environment.parse(source)
            #: Names of the variables that the template reads.
            self.variables = frozenset(one.name for one in tree.find_all(nodes.Name) if one.ctx == "load")
            for loop in list(tree.find_all(nodes.For)):
                loop.iter = _filtered("_each", loop.iter)
            _wrap_values(tree)
            self._template = environment.from_string(tree)
        finally:
            _budget.reset(token)

    def render(self, variables: Mapping[str, Any], input_chars: int) -> Rendered:
        """Render the template.

        Args:
            variables: variables of the template, such as messages and tools.
            input_chars: number of characters in them. The limits are proportional to it.

        Raises:
            jinja2.TemplateError: if the template rejects the conversation or exceeds a limit. An expression of the
                template may raise any other exception.
        """
        budget = _Budget(input_chars)
        token = _budget.set(budget)
        num_chars = 0
        try:
            for block in self._template.generate(variables):
                num_chars += len(block)
                budget.check_size(num_chars)
                budget.blocks.append(block)
        finally:
            _budget.reset(token)
        return Rendered("".join(budget.blocks), budget.generated)


class _Generation(ext.Extension):
    """jinja2 extension for the block `{% generation %}`, which records the range of characters of the block's text."""

    tags = frozenset(("generation",))  # pyright: ignore[reportAssignmentType] - jinja2 declares a set

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        text, budget = caller(), _current()
        start = sum(map(len, budget.blocks))
        budget.generated.append((start, start + len(text)))
        return text


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with counted loops and calls, and limited values."""

    intercepted_binops = frozenset(("**", "*", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name in _REMOVED_GLOBALS:
            del self.globals[name]
        self.filters = {name: _bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _to_json, "_each": _each, "_sized": _sized}
        self.globals |= {
            "raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace, "dict": dict,
        }  # fmt: skip

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute or an item. Keys of messages and common methods of texts skip the usual checks."""
        if type(obj) is dict and attribute not in _DICT_NAMES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if type(obj) is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def concat(self, parts: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride] - as jinja2 reads it
        """Join the output of a macro or a block."""
        budget, found, num_chars = _current(), [], 0
        for part in parts:
            num_chars += len(part)
            budget.check_size(num_chars)
            found.append(part)
        budget.copy(num_chars)
        return "".join(found)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _current()
        budget.spend(1)
        # The sandbox wraps str.format, and stores the method as __wrapped__.
        owner, name = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            _check_method(owner, name, args, kwargs, budget)
        return _sized(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operator(operator, left, right)
        return _sized(super().call_binop(context, operator, left, right))


def _filtered(name: str, value: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _wrap_values(tree: nodes.Node) -> None:
    """Add size checks to the nodes of a template that build sums, joined texts, lists and dicts."""
    for node in list(tree.iter_child_nodes()):
        _wrap_values(node)
    for field, value in tree.iter_fields():
        if isinstance(value, list):
            setattr(tree, field, [_wrapped(one, tree) for one in value])
        else:
            setattr(tree, field, _wrapped(value, tree))


def _wrapped(node: Any, parent: nodes.Node) -> Any:
    if isinstance(node, nodes.Add | nodes.Concat):
        children = list(node.find_all(nodes.Expr))
        if len(children) > _MAX_TERMS:
            raise TemplateLimit(f"joins more than {_MAX_TERMS} values in one expression")
        # The output is checked block by block, and a nested sum by the outermost one.
        if isinstance(parent, nodes.Output | nodes.Add | nodes.Concat):
            return node
    elif isinstance(node, nodes.List | nodes.Tuple | nodes.Dict) and getattr(node, "ctx", "load") == "load":
        children = node.items
    else:
        return node
    if all(isinstance(one, nodes.Const | nodes.TemplateData) for one in children):
        return node
    return _filtered("_sized", node)


def _sized(value: Any) -> Any:
    """Check the size of a value, including its contents, and return it."""
    if isinstance(value, str):
        _current().copy(len(value))
    elif isinstance(value, _CONTAINERS):
        _check_contents(value)
    elif isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
        raise TemplateLimit(_SIZE)
    return value


def _check_contents(value: Any) -> None:
    budget, stack, size = _current(), [value], 0
    while stack:
        one = stack.pop()
        if isinstance(one, _CONTAINERS):
            size += len(one)
            stack.extend(one.values() if isinstance(one, dict) else one)
            budget.spend(len(one))
        elif isinstance(one, str):
            size += len(one)
        elif isinstance(one, _Namespace):
            raise TemplateLimit("puts a namespace into a list")
        budget.check_size(size)


def _each(value: Any) -> Any:
    budget = _current()
    if not hasattr(value, "__len__"):
        if not isinstance(value, Iterable):
            return value  # the loop raises jinja2's error
        value = list(islice(value, budget.steps + 1))
    budget.spend(1 + len(value))
    return value


def _check_operator(operator: str, left: Any, right: Any) -> None:
    if operator == "**":
        if isinstance(left, int) and isinstance(right, int) and abs(left).bit_length() * abs(right) > _MAX_INT_BITS:
            raise TemplateLimit(_SIZE)
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                _current().check_size(len(value) * max(0, times))
    elif isinstance(left, str):
        _check_format(left)


def _check_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateLimit("formats a value wider than a conversation needs")


def _check_method(owner: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget: _Budget) -> None:
    """Check a call to a string method before it runs.

    Raise TemplateLimit if the method is not allowed, or its result could be too large.
    """
    if name in _REMOVED_METHODS:
        raise TemplateLimit(f"calls the method {name} of a text, which chat templates may not use")
    _check_arguments((*args, *kwargs.values()))
    if name == "format":
        _check_format(owner)
    elif name == "replace":
        _check_replace(owner, args, budget)
    elif name == "join" and args:
        _check_join(owner, args[0], budget)


def _check_arguments(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
            raise TemplateLimit(_SIZE)


def _check_replace(text: str, args: tuple[Any, ...], budget: _Budget) -> None:
    if len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        budget.check_size(len(text) + text.count(args[0]) * max(0, len(args[1]) - len(args[0])))


def _check_join(separator: str, parts: Any, budget: _Budget) -> None:
    budget.check_size(len(separator) * (len(parts) if hasattr(parts, "__len__") else budget.max_size))


def _bounded(name: str, function: Any) -> Any:
    """Wrap a filter of jinja2 with checks of its arguments and its result.

    jinja2's attributes of the filter, such as the one set by pass_context, are kept.
    """
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        budget, value, rest = _current(), args[num_passed], args[num_passed + 1 :]
        budget.spend(1)
        _check_arguments((*rest, *kwargs.values()))
        if name == "format":
            _check_format(str(value))
        elif name == "replace":
            _check_replace(str(value), rest, budget)
        elif name == "join":
            if not hasattr(value, "__len__"):
                value = list(islice(value, budget.steps + 1)) if isinstance(value, Iterable) else value
                args = (*args[:num_passed], value, *rest)
            _check_join(str(rest[0] if rest else kwargs.get("d", "")), value, budget)
        elif name == "indent" and any(isinstance(one, int) and one > _MAX_INDENT for one in (*rest, *kwargs.values())):
            raise TemplateLimit(_SIZE)
        elif name == "sum" and isinstance(kwargs.get("start", rest[1] if len(rest) > 1 else 0), _SIZED):
            raise TemplateLimit(_WORK)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            return _counted(result, budget)
        return _sized(result)

    return checked


def _counted(values: Iterator[Any], budget: _Budget) -> Iterator[Any]:
    for value in values:
        budget.spend(1)
        yield value


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int | str) and (indent if isinstance(indent, int) else len(indent)) > _MAX_INDENT:
        raise TemplateLimit(_SIZE)
    _current().spend(1)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: Any = "") -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Namespace(jinja2.utils.Namespace):
    """Variables that survive a loop. Names with a leading underscore are rejected."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        values = dict(*args[1:], **kwargs)
        if any(str(name).startswith("_") for name in values):
            raise jinja2.TemplateError("a namespace may not have names that begin with an underscore")
        jinja2.utils.Namespace.__init__(args[0], values)

    def __setitem__(self, name: Any, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.TemplateError("a namespace may not have names that begin with an underscore")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"
