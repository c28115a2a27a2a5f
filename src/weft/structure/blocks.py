"""A model's repeated blocks: what is recomputed, compiled and gathered one at a time."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks by module path, in the order of the modules; empty where there are none.

    They are the children of the outermost ModuleLists. A model without any has the composite children of its
    Sequentials (a residual network's stages are made so). A block never lies inside another, and a block that is
    listed under several paths has the first.
    """
    found = list(_in_lists(model, "")) or list(_in_sequentials(model, ""))
    paths: dict[int, str] = {}
    for path, block in found:
        paths.setdefault(id(block), path)
    return {path: block for path, block in found if paths[id(block)] == path}


def _in_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList) and has_params(child):
            yield join_path(path, name), child
        else:
            yield from _in_lists(child, join_path(path, name))


def _in_sequentials(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(module, nn.Sequential) and _is_composite(child) and not _holds_blocks(child):
            yield join_path(path, name), child
        else:
            yield from _in_sequentials(child, join_path(path, name))


def _holds_blocks(module: nn.Module) -> bool:
    """Whether some Sequential in it, or it itself, is made of parts that have parts."""
    sequentials = (part for part in module.modules() if isinstance(part, nn.Sequential))
    return any(_is_composite(child) for part in sequentials for child in part.children())


def _is_composite(module: nn.Module) -> bool:
    return any(has_params(child) for child in module.children())


def has_params(module: nn.Module) -> bool:
    """Whether there is any parameter in it."""
    return next(module.parameters(), None) is not None


def join_path(path: str, name: str) -> str:
    """The path of what is called `name` in the module of that path."""
    return f"{path}.{name}" if path else name
