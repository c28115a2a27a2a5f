"""Replacement of a model's embedding tables by this rank's parts, as a layout assigns them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Axis, Mesh
from weft.config.fields.layout import Layout
from weft.config.table_plans import table_plan_problems
from weft.errors import CommError, LayoutError, ModelError, PlanError
from weft.models.adapters import adapted
from weft.models.initialize import initialise_parameter
from weft.models.inspect.blocks import replace_class
from weft.models.keras_model import VARIABLES, KerasEmbedding
from weft.parallel.state.precision import Precision
from weft.parallel.tables.choice import choose_styles
from weft.parallel.tables.host import TableSettings
from weft.parallel.tables.lookup import KerasTable, TableBag, TableEmbedding
from weft.parallel.tables.table import LookupQueue, Table, starts_of
from weft.private_torch import named_modules

#: Modules with tables. All have the attributes of an nn.Embedding.
TableModule = nn.Embedding | nn.EmbeddingBag | KerasEmbedding
_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: TableEmbedding,
    nn.EmbeddingBag: TableBag,
    KerasEmbedding: KerasTable,
}


def shard_tables(
    model: nn.Module, mesh: Mesh, layout: Layout, settings: TableSettings, example: Any = None
) -> list[Table]:
    """Replace the tables that a layout names by this rank's parts. All ranks call it. Modifies the model.

    Args:
        settings: settings of the tables.
        example: arguments of a forward, which style auto counts ids of, or None.

    Raises:
        PlanError: if the plan does not support tables.
        LayoutError: if a pattern matches no table, or a table has fewer columns than there are ranks.
        ModelError: for an unsupported table.
        CommError: if ranks built different tables.
    """
    if problems := table_plan_problems(mesh.plan):
        raise PlanError(problems)
    if adapted(model) is not None:
        raise ModelError("model: it has an adapter, and tables of a layout are trained in full. Leave one of them out.")
    modules, axis, precision = _named_tables(model, layout), mesh.data, Precision.of(mesh.plan)
    _expect_same(modules, axis, mesh.device)
    asked = {path: module for path, (module, style) in modules.items() if style == "auto"}
    chosen = choose_styles(model, asked, axis, mesh.device, example) if asked else {}
    modules |= {path: (module, chosen[path].cost.style) for path, module in asked.items()}
    owners = _owners(modules, axis.size)
    tables, queue = list[Table](), LookupQueue()
    for path, (module, style) in modules.items():
        full = module.get_parameter("weight")
        shape = (full.shape[0], full.shape[1])
        starts = starts_of(style, shape, axis.size, owners.get(path, 0))
        table = Table(f"{path}.weight", module, style, axis, starts, full, shape, precision.compute, queue)
        table.why = chosen[path].why if path in chosen else "set by the layout"
        table.host = settings if style == "host" else None
        if full.is_meta:
            part = torch.empty(table.part_of(full).shape, dtype=precision.master, device="meta")
        else:
            part = table.first_ranks_part(full, precision.master, mesh.device)
        table.weight = module.weight = nn.Parameter(part)
        replace_class(module, _KINDS[type(module)], table=table)
        tables.append(table)
    return tables


def _named_tables(model: nn.Module, layout: Layout) -> dict[str, tuple[TableModule, str]]:
    """Return the tables of a layout, each with its style, by path. Raises an error for an entry without a table."""
    known = {path: module for path, module in named_modules(model) if path}
    if unused := layout.unused(known):
        raise LayoutError(f"layout pattern {unused[0]!r}: it matches no module. Tables are {_listed(known)}.")
    found: dict[str, tuple[TableModule, str]] = {}
    for path, module in known.items():
        style = layout.match(path)
        if style is None:
            continue
        holder = dict(module.named_children()).get(VARIABLES)
        if isinstance(holder, KerasEmbedding):
            path, module = f"{path}.{VARIABLES}", holder
        if type(module) not in _KINDS:
            if style == "auto":
                continue  # its patterns select tables among other modules
            raise LayoutError(
                f"{path}={style}: {path} is a {type(module).__name__}, and tables are nn.Embedding or "
                f"nn.EmbeddingBag. Tables are {_listed(known)}."
            )
        assert isinstance(module, TableModule)
        _refuse_unsupported(path, module, model)
        found[path] = module, style
    if not found:
        raise LayoutError(f"layout {layout}: its patterns match no table. Tables are {_listed(known)}.")
    return found


def _listed(known: dict[str, nn.Module]) -> str:
    paths = (path.removesuffix(f".{VARIABLES}") for path, module in known.items() if type(module) in _KINDS)
    return ", ".join(paths) or "none in this model"


def _refuse_unsupported(path: str, module: TableModule, model: nn.Module) -> None:
    if module.max_norm is not None:
        raise ModelError(
            f"max_norm={module.max_norm}: {path} scales rows in forward, and ranks look up rows of other ranks. Use "
            "max_norm=None."
        )
    if module.scale_grad_by_freq:
        raise ModelError(
            f"scale_grad_by_freq=True: {path} divides gradients by frequencies in one microbatch on one rank. Use "
            "scale_grad_by_freq=False."
        )
    if not module.weight.requires_grad:
        raise ModelError(f"table {path!r}: it is frozen, and only trained tables are sharded. Leave it out of layout.")
    if [name for name, _ in module.named_parameters()] != ["weight"]:
        raise ModelError(f"table {path!r}: its weight is computed from other parameters. Leave it out of layout.")
    names = [name for name, param in model.named_parameters(remove_duplicate=False) if param is module.weight]
    if len(names) > 1:
        raise ModelError(
            f"table {path!r}: {' and '.join(names)} are one weight, and only lookups of a sharded table are supported. "
            "Leave it out of layout."
        )


def _owners(modules: dict[str, tuple[TableModule, str]], num_ranks: int) -> dict[str, int]:
    """Return the rank of each table with style "one": in order of size, the rank with the fewest elements so far.

    Raises LayoutError for style columns with fewer columns than ranks.
    """
    load, owners = [0] * num_ranks, dict[str, int]()
    for path, (module, style) in modules.items():
        if style == "columns" and module.embedding_dim < num_ranks:
            raise LayoutError(
                f"{path}=columns: {module.embedding_dim} columns are fewer than the {num_ranks} data ranks. Use "
                f"{path}=rows."
            )
    single = [(module.weight.numel(), path) for path, (module, style) in modules.items() if style == "one"]
    for numel, path in sorted(single, key=lambda one: -one[0]):
        owners[path] = load.index(min(load))
        load[owners[path]] += numel
    return owners


def _expect_same(modules: dict[str, tuple[TableModule, str]], axis: Axis, device: torch.device) -> None:
    """Raise CommError if ranks have different tables, before a collective could fail on their shapes."""
    rows = [(path, style, tuple(module.weight.shape)) for path, (module, style) in modules.items()]
    digest = hashlib.blake2b(repr(rows).encode(), digest_size=8).digest()
    number = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=device)
    if all_reduce(number.clone(), axis, op="max") != all_reduce(number.clone(), axis, op="min"):
        raise CommError("model: ranks built different embedding tables. Build the same model on every rank.")


@contextmanager
def outside_model(tables: Sequence[Table]) -> Iterator[None]:
    """Remove the tables' weights from their modules in this context, so that no bucket contains them."""
    for table in tables:
        del table.module.weight
    try:
        yield
    finally:
        for table in tables:
            table.module.register_parameter("weight", table.weight)


@torch.no_grad()
def materialize_tables(tables: Sequence[Table], seed: int | None, filled_later: bool, device: torch.device) -> None:
    """Create the values of tables on the meta device: from the seed, or only memory if they are loaded later.

    The full table exists on the host for a moment.
    """
    for table in tables:
        weight = table.weight
        if not weight.is_meta:
            continue
        part = table.empty(weight.shape, weight.dtype, device)
        if not filled_later:
            if seed is None:
                raise ModelError(f"parameter {table.name!r}: it is on the meta device. Give seed= to make its values.")
            full = torch.empty(table.full_shape, dtype=weight.dtype)
            initialise_parameter(full, table.name, table.module, seed)
            part.copy_(table.part_of(full))
        table.weight = nn.Parameter(part)
