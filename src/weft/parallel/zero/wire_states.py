"""What wires carry from step to step, in checkpoints: each rank's own tensors, for the plan that made them.

They fit the ranks and buckets of one plan. Under another plan a run starts with nothing owed, and says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from weft.comm.wire import BASIS
from weft.parallel.placement import DataParallel

#: The plan that made the others, as bytes of its text.
_PLAN = "plan"
#: Steps that were taken, for wires that round by chance or begin later; under any plan.
_TURN = "turn"


def carried_here(engine: DataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's tensors as (`rank/tensor/role/name`, tensor), and the plan; nothing where it carries none."""
    mesh, states = engine.axes.mesh, engine.coders.states()
    yield from ((f"{mesh.rank}/{name}", tensor) for name, tensor in states.items())
    if engine.coders.counts_turns:
        yield _TURN, torch.tensor([engine.coders.turn], dtype=torch.int64)
    if states:
        yield _PLAN, torch.frombuffer(bytearray(str(mesh.plan).encode()), dtype=torch.uint8).clone()


def load_carried(engine: DataParallel, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Give this rank what `carried_here` gave. Lines that say what does not fit this plan and is left out."""
    coders, mesh = engine.coders, engine.axes.mesh
    coders.forget()
    if _TURN in tensors:
        coders.take_turn(int(tensors[_TURN]))
    saved = bytes(tensors[_PLAN].tolist()).decode() if _PLAN in tensors else ""
    if saved and saved != str(mesh.plan):
        if all(name in (_TURN, _PLAN) or f"/{BASIS}/" in name for name in tensors):
            return []  # what low rank begins with: any plan does without
        return [
            f"the rounding errors that reduce kept under '{saved}' are dropped: this plan is '{mesh.plan}', and "
            "it starts without any"
        ]
    start = f"{mesh.rank}/"
    found = {name.removeprefix(start): tensors[name] for name in tensors if name.startswith(start)}
    coders.load({name: tensor.to(mesh.device, copy=True) for name, tensor in found.items()})
    return []
