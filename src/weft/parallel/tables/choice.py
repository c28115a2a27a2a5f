"""Choice of the styles of tables with style auto, by rows, width and ids of a step. Equal on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Axis
from weft.devices import access
from weft.errors import ModelError
from weft.models.inspect.dry_run import call_without_numbers, without_numbers
from weft.models.keras_model import KerasEmbedding
from weft.planner.cost.embedding_tables import TableChoice, TableShape, TableWork, choose

#: Ids of a table that a rank reads in a step, if no example shows them.
_IDS = 4096
#: Part of the device's free memory that tables and states may take. The dense part and activations need the rest.
_PART = 0.7


def choose_styles(
    model: nn.Module,
    tables: Mapping[str, nn.Embedding | nn.EmbeddingBag | KerasEmbedding],
    axis: Axis,
    device: torch.device,
    example: Any,
) -> dict[str, TableChoice]:
    """Return the style of each table, with its reason. All ranks call it.

    Args:
        tables: tables with style auto, by path.
        device: device of the rank.
        example: arguments of a forward on a rank's batch, or None. Without them every table reads equally many ids.

    Raises:
        ModelError: if the model cannot run on the example.
    """
    ids = dict.fromkeys(tables, 0) if example is None else _ids_of(model, tables, example)
    free = access.free_bytes(device) if access.is_accelerator(device) else None
    known = torch.tensor([*ids.values(), 2**62 if free is None else free], device=device)
    most = all_reduce(known[:-1].clone(), axis, op="max").tolist()  # ranks have examples of their own
    limit = int(all_reduce(known[-1:].clone(), axis, op="min"))
    shapes = [
        TableShape(name=path, rows=table.num_embeddings, width=table.embedding_dim, ids=number or _IDS)
        for (path, table), number in zip(tables.items(), most, strict=True)
    ]
    work = TableWork(ranks=axis.size, samples=1, optimizer="adagrad")
    return {one.table.name: one for one in choose(shapes, work, _PART * limit)}


def _ids_of(model: nn.Module, tables: Mapping[str, nn.Module], example: Any) -> dict[str, int]:
    """Return the number of ids that a forward reads from each table."""
    found = dict.fromkeys(tables, 0)

    def count(path: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found[path] += inputs[0].numel()

    with ExitStack() as stack:
        for path, table in tables.items():
            hook = table.register_forward_pre_hook(partial(count, path))
            stack.callback(hook.remove)
        try:
            call_without_numbers(model, without_numbers(example, model), nullcontext())
        except ModelError as error:
            raise ModelError(f"auto: {error} Leave example out, or write the styles of the tables.") from error
    return found
