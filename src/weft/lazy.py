"""Names that are loaded only when they are first asked for: a package's own (PEP 562), and those of users."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def loads(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`: `homes` maps each public name to its module, as in `{"Plan": ".spec.plan"}`.

    A name that was loaded becomes an ordinary attribute, so the function is asked once for each.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def named_object(source: str) -> Any:
    """What `package.module:name` names; the working folder can be imported from.

    Raises whatever importing that module raises, and AttributeError where it has no such name.
    """
    module_name, _, name = source.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return getattr(importlib.import_module(module_name), name)
