"""Quantized weights of forward that differ from the rounded masters, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import DataParallel
from weft.parallel.zero_flat.model import FlatModel
from weft.parallel.zero_flat.optimizer_states import QuantizedWeights


def quantized_slices(engine: DataParallel) -> Iterator[FlatSlice]:
    """Yield this rank's slices of forward's weights under gather=diff4, else nothing. No collective."""
    if isinstance(engine, FlatModel):
        engine.arrive()
        yield from QuantizedWeights(engine.reducer.buckets, engine.axes).stretches()


def load_quantized_weights(engine: DataParallel, source: StateSource) -> None:
    """Load forward's weights from a checkpoint of any plan, after its masters were loaded. All ranks call it."""
    if isinstance(engine, FlatModel):
        engine.arrive()
        QuantizedWeights(engine.reducer.buckets, engine.axes).take(source)
