"""Lazy imports of a package's public names (PEP 562), and imports of user objects by name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any


def loads(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` function for a package whose public names are imported at first use.

    An imported name becomes an attribute of the package, so the function is called once per name.

    Args:
        package: name of the package.
        homes: the module of each public name, as in `{"Plan": ".config.plan"}`.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def named_object(source: str) -> Any:
    """Return the object that `package.module:name` or `path/to/file.py:name` refers to.

    The working directory and the folder of a file are added to the import path. Exceptions of the import propagate.

    Raises:
        AttributeError: if the module has no such name.
    """
    module_name, _, name = source.rpartition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module = _module_in(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    if not hasattr(module, name):
        import difflib

        near = difflib.get_close_matches(name, vars(module), n=1)
        raise AttributeError(f"{module_name} has no {name!r}" + (f". Did you mean {near[0]!r}?" if near else ""))
    return getattr(module, name)


def _module_in(file: Path) -> ModuleType:
    """Load the module of a file, only once, and return it. Its folder is added to the import path, as for a script.

    Raises FileNotFoundError if there is no such file.
    """
    import hashlib
    import importlib.util

    path = file.resolve()
    key = f"weft_file_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {str(file)!r}")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[key]
        raise
    return module
