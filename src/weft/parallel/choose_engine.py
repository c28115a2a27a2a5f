"""Choice of the engine for the plan's ZeRO stage, and functions for states that only flat buckets have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from weft.comm.mesh import Mesh
from weft.memory.offload import Host
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import DataParallel
from weft.parallel.state.placement import Placement
from weft.parallel.tables.model import TableModel
from weft.parallel.tables.table import Table
from weft.parallel.zero_flat.model import FlatModel
from weft.parallel.zero_flat.optimizer_states import QuantizedWeights
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
    tables: list[Table] | None = None,
) -> DataParallel:
    """Shard the model's parameters in place for the plan's ZeRO stage, and materialize those on the meta device.

    Raises ModelError for parameters that the stage does not support. Raises CommError if ranks built different models.

    Args:
        model: model after all other techniques were applied.
        placements: placements of parameters that techniques changed, by name.
        host: host memory for the plan's share of states, or None if nothing is offloaded.
        seed: seed of parameters on the meta device, or None if there are no such parameters.
        filled_later: True if `load_weights` fills parameters on the meta device, so that no seed is needed.
        tables: embedding tables of which ranks hold parts, or None.
    """
    if tables:
        return TableModel(model, mesh, placements, tables, host=host, seed=seed, filled_later=filled_later)
    kind = FullyShardedModel if mesh.plan.zero == 3 else FlatModel
    return kind(model, mesh, placements, host=host, seed=seed, filled_later=filled_later)


def recorded_passes(engine: DataParallel) -> RecordedPasses | None:
    """Return the state of recorded microbatches (CUDA graphs), or None if the engine does not support them (zero=3)."""
    return engine.recorded if isinstance(engine, FlatModel) else None


def quantized_slices(engine: DataParallel) -> Iterator[FlatSlice]:
    """Yield this rank's slices of the quantized weights that forward uses under gather=diff4. No collective.

    Yields nothing for other plans.
    """
    if isinstance(engine, FlatModel):
        engine.wait_for_weights()
        yield from QuantizedWeights(engine.reducer.buckets, engine.axes).flat_slices()


def load_quantized_weights(engine: DataParallel, source: StateSource) -> None:
    """Load the quantized weights that forward uses under gather=diff4, after the master weights. All ranks call it.

    The checkpoint may be from any plan. Does nothing if this plan or the checkpoint has no quantized weights.
    """
    if isinstance(engine, FlatModel):
        engine.wait_for_weights()
        QuantizedWeights(engine.reducer.buckets, engine.axes).take(source)
