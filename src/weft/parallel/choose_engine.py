"""Which engine serves which stage of ZeRO."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from weft.comm.mesh import Mesh
from weft.memory.offload import Host
from weft.parallel.state.gradients import DataParallel
from weft.parallel.state.placement import Placement
from weft.parallel.zero_flat.model import FlatModel
from weft.parallel.zero_flat.step import RecordedPasses
from weft.parallel.zero_sharded.model import FullyShardedModel


def build_engine(
    model: nn.Module,
    mesh: Mesh,
    placements: Mapping[str, Placement],
    *,
    host: Host | None = None,
    seed: int | None = None,
    filled_later: bool = False,
) -> DataParallel:
    """Divide the model's parameters as the plan's stage says, in place, and make those on the meta device.

    Args:
        model: cut by all techniques.
        mesh: of the plan.
        placements: what techniques did to parameters, by name.
        host: where the plan's share of states goes; None: nothing goes there.
        seed: of parameters on the meta device; None: there are none.
        filled_later: whether `load_weights` gives those their values, and no seed does.

    Raises:
        ModelError: for parameters that the stage cannot hold.
        CommError: where ranks built different models.
    """
    kind = FullyShardedModel if mesh.plan.zero == 3 else FlatModel
    return kind(model, mesh, placements, host=host, seed=seed, filled_later=filled_later)


def recorded_passes(engine: DataParallel) -> RecordedPasses | None:
    """Return how the engine's passes are recorded; None where it communicates within them, as zero=3 does."""
    return engine.recorded if isinstance(engine, FlatModel) else None
