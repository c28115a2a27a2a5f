"""Which way an operation takes through the slots of a shared segment."""

from __future__ import annotations

from weft.comm.links.combine import Combiner
from weft.comm.links.link import Operation
from weft.comm.links.parts import Parts, PartsReduceScatter, PartsSplitReduce, PartsWholeReduce
from weft.comm.links.routes import (
    WHOLE_BYTES,
    AllGather,
    AllToAll,
    Barrier,
    Broadcast,
    ReduceScatter,
    Route,
    SplitReduce,
    WholeReduce,
)

_KINDS: dict[str, type[Route]] = {
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "broadcast": Broadcast,
    "barrier": Barrier,
}


def route(operation: Operation, rank: int, size: int, combine: Combiner) -> Route:
    """The way of `operation`."""
    in_parts = isinstance(operation.source, Parts)
    if operation.kind == "reduce_scatter":
        kind: type[Route] = PartsReduceScatter if in_parts else ReduceScatter
    elif operation.kind == "all_reduce":
        whole = size == 2 or operation.source.nbytes <= WHOLE_BYTES
        kinds = (PartsWholeReduce, WholeReduce) if whole else (PartsSplitReduce, SplitReduce)
        kind = kinds[0] if in_parts else kinds[1]
    else:
        kind = _KINDS[operation.kind]
    return kind(operation, rank, size, combine)
