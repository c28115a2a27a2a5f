"""Choice of an operation's route through the slots of a shared segment."""

from __future__ import annotations

import torch

from weft.comm.transports.link import Combiner, Operation
from weft.comm.transports.routes import (
    WHOLE_BYTES,
    AllGather,
    AllToAll,
    Barrier,
    Broadcast,
    DirectReduce,
    ReduceScatter,
    Route,
    SplitReduce,
)
from weft.comm.transports.scattered_routes import PartsReduceScatter, PartsSplitReduce, ScatteredDirectReduce
from weft.comm.transports.scattered_tensor import Parts

_KINDS: dict[str, type[Route[torch.Tensor]]] = {
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "broadcast": Broadcast,
    "barrier": Barrier,
    "reduce_scatter": ReduceScatter,
}


def route(operation: Operation, rank: int, size: int, combine: Combiner) -> Route[torch.Tensor] | Route[Parts]:
    source = operation.source
    whole = size == 2 or source.nbytes <= WHOLE_BYTES
    if isinstance(source, Parts):
        if operation.kind == "reduce_scatter":
            return PartsReduceScatter(operation, source, rank, size, combine)
        return (ScatteredDirectReduce if whole else PartsSplitReduce)(operation, source, rank, size, combine)
    if operation.kind == "all_reduce":
        return (DirectReduce if whole else SplitReduce)(operation, source, rank, size, combine)
    return _KINDS[operation.kind](operation, source, rank, size, combine)
