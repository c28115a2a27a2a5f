"""Engine for each stage of ZeRO."""

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
    """Shard the model's parameters in place for the plan's ZeRO stage, and materialize those on the meta device.

    Args:
        model: model after all other techniques were applied.
        mesh: mesh of the plan.
        placements: placements of parameters that techniques changed, by name.
        host: host memory for the plan's share of states, or None if nothing is offloaded.
        seed: seed of parameters on the meta device, or None if there are no such parameters.
        filled_later: `load_weights` fills parameters on the meta device instead of a seed.

    Raises:
        ModelError: for parameters that the stage does not support.
        CommError: if ranks built different models.
    """
    kind = FullyShardedModel if mesh.plan.zero == 3 else FlatModel
    return kind(model, mesh, placements, host=host, seed=seed, filled_later=filled_later)


def recorded_passes(engine: DataParallel) -> RecordedPasses | None:
    """Return the recording state of the engine's passes, or None if it communicates within them (zero=3)."""
    return engine.recorded if isinstance(engine, FlatModel) else None
