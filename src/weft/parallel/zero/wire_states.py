"""What wires carry from step to step, in checkpoints: each rank's own tensors, for the plan that made them.

They fit the ranks and buckets of one plan. Under another plan a run starts with nothing owed, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weft.comm import broadcast
from weft.parallel.placement import DataParallel
from weft.parallel.zero.states import DTYPES, exchange

#: The plan that made the others, as bytes of its text.
_PLAN = "plan"


def gather_carried(engine: DataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """All ranks' tensors as (`rank/tensor/role/name`, tensor), and the plan; nothing where no wire carries any.

    A collective over all ranks, which iterate to the end.
    """
    coders, world, mesh = engine.coders, engine.axes.world, engine.axes.mesh
    if not coders.wire.spec.state_bytes:
        return
    mine = {f"{mesh.rank}/{name}": tensor for name, tensor in coders.states().items()}
    told = {name: {"": {"shape": list(one.shape), "dtype": str(one.dtype)}} for name, one in mine.items()}
    table = exchange(told, world, mesh.device)
    for name in sorted(table):
        entry = table[name][""]
        root = world.ranks.index(int(name.partition("/")[0]))
        empty = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device=mesh.device)
        yield name, broadcast(mine[name].clone() if name in mine else empty, world, root)
    if table:
        yield _PLAN, torch.frombuffer(bytearray(str(mesh.plan).encode()), dtype=torch.uint8).clone()


def load_carried(engine: DataParallel, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Give this rank what `gather_carried` gave. Lines that say what does not fit this plan and is left out."""
    coders, mesh = engine.coders, engine.axes.mesh
    coders.forget()
    saved = bytes(tensors[_PLAN].tolist()).decode() if _PLAN in tensors else ""
    if saved and saved != str(mesh.plan):
        return [f"what reduce rounded off under '{saved}' is left out: this is '{mesh.plan}', and it starts with none"]
    start = f"{mesh.rank}/"
    found = {name.removeprefix(start): tensors[name] for name in tensors if name.startswith(start)}
    coders.load({name: tensor.to(mesh.device, copy=True) for name, tensor in found.items()})
    return []
