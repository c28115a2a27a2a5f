"""Where a model can be cut into stages: its chain of blocks, and what lies before and after it.

    embed, pos_embed -> blocks.0, blocks.1, ... -> norm, head

The chain is the one ModuleList of blocks, or the Sequential that the model is or holds. What holds parameters outside
of it runs before the first block or after the last one: an embedding before, what a Hugging Face model says is its head
after, anything else in order of registration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from weft.errors import ModelError
from weft.structure.blocks import Site, has_params, join_path, repeated_blocks
from weft.structure.layers import find_lm_head, table_params
from weft.structure.private_torch import children


@dataclass(frozen=True, slots=True)
class Chain:
    """blocks in order; before, after: the modules with parameters that run before the first and after the last."""

    blocks: tuple[Site, ...]
    before: tuple[Site, ...]
    after: tuple[Site, ...]

    @property
    def sites(self) -> tuple[Site, ...]:
        """All of them."""
        return (*self.before, *self.blocks, *self.after)


def find_chain(model: nn.Module) -> Chain:
    """Return the chain of a model.

    Raises:
        ModelError: where there is none, several, or a parameter that belongs to no part of it.
    """
    path = _chain_path(model)
    holder = model.get_submodule(path) if path else model
    blocks = tuple(Site(holder, key, join_path(path, key)) for key in children(holder))
    before: list[Site] = []
    after: list[Site] = []
    passed = False
    head = find_lm_head(model)
    for site in _beside(model, path):
        if site is None:
            passed = True
        elif (passed and not _is_table(site.module)) or (head is not None and head in site.module.modules()):
            after.append(site)
        else:
            before.append(site)
    return Chain(blocks, tuple(before), tuple(after))


def _chain_path(model: nn.Module) -> str:
    """Path of the module whose children are the chain."""
    paths = {path.rpartition(".")[0] for path in repeated_blocks(model)}
    if len(paths) == 1:
        return paths.pop()
    if isinstance(model, nn.Sequential):
        return ""
    found = f"it has {len(paths)} lists of blocks ({', '.join(sorted(paths))})" if paths else "it has no list of blocks"
    raise ModelError(
        f"model of type {type(model).__name__}: a pipeline cuts one chain of blocks, and {found}. "
        f"Put the blocks into one nn.ModuleList or nn.Sequential, or use pp=1."
    )


def _beside(model: nn.Module, chain_path: str) -> Iterator[Site | None]:
    """Modules with parameters beside the chain, topmost and in order of registration; None stands for the chain."""
    if not chain_path:
        yield None
        return
    first, _, rest = chain_path.partition(".")
    yield from _children(model, "", first, rest)


def _children(module: nn.Module, path: str, inner: str, rest: str) -> Iterator[Site | None]:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ModelError(
            f"parameter {join_path(path, own[0])!r}: it lies beside the chain of blocks, in no module of its own, so "
            f"no stage owns it. Put it into a module that runs before or after the blocks, or use pp=1."
        )
    for key, child in children(module).items():
        if child is None:
            continue
        if key != inner:
            if has_params(child):
                yield Site(module, key, join_path(path, key))
        elif rest:
            deeper, _, remaining = rest.partition(".")
            yield from _children(child, join_path(path, key), deeper, remaining)
        else:
            yield None


def _is_table(module: nn.Module) -> bool:
    """Whether all its parameters are tables that are looked up."""
    return table_params(module).issuperset(module.parameters())
