"""Engine of a model with sharded tables: flat buckets for dense parameters, gradients by row for tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.errors import ModelError
from weft.memory.offload import Host
from weft.optim.step_decision import StepDecision
from weft.optim.table_optimizer import TableOptimizer
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.placement import Placement
from weft.parallel.tables.apply import materialize_tables, outside_model
from weft.parallel.tables.exchange import exchange_gradients
from weft.parallel.tables.joined import join_tables
from weft.parallel.tables.lookup import open_lookups, refuse_weight
from weft.parallel.tables.row_prefetch import Prefetcher
from weft.parallel.tables.table import Table
from weft.parallel.tables.table_updates import TableUpdates
from weft.parallel.zero_flat.model import FlatModel


class TableModel(FlatModel):
    """The engine of zero=0, 1 and 2 for a model of which data ranks hold parts of embedding tables.

    Args:
        tables: the tables, from `shard_tables`.
        model, mesh, placements, host, seed, filled_later: as in `build_engine`, with the same errors.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        placements: Mapping[str, Placement],
        tables: list[Table],
        *,
        host: Host | None = None,
        seed: int | None = None,
        filled_later: bool = False,
    ):
        for table in tables:  # moved to the device since
            weight = table.held
            assert isinstance(weight, nn.Parameter)
            table.weight = weight
        materialize_tables(tables, seed, filled_later, mesh.device)
        self._all_joined = join_tables(tables)
        for table in tables:
            table.open_cache(mesh.device)
        with outside_model(tables):
            super().__init__(model, mesh, placements, host=host, seed=seed, filled_later=filled_later)
        self.tables, self.queue = tables, tables[0].queue
        self._rows = Prefetcher(self.queue, tables[0].axis, mesh.device)
        self._updates = TableUpdates(self._all_joined, self.axes)
        self._square = torch.zeros((), dtype=torch.float64, device=mesh.device)
        self._factor = 1.0
        self.axes.divide_tables({table.name: Placement(whole_shape=table.full_shape) for table in tables})

    # --- the step ---

    def begin_step(self) -> None:
        super().begin_step()
        self._factor = 1.0
        self.queue.most = 0
        for joined in self._all_joined:
            joined.table.calls, joined.table.rows, joined.table.grads = [], None, None
        for table in self.tables:
            if table.held is not table.weight or not table.weight.requires_grad:
                raise ModelError(
                    f"parameter {table.name!r}: it was replaced or frozen after parallelize. Do that before "
                    "parallelize."
                )

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        self._rows.begin_microbatch(last)
        with super().microbatch(last), open_lookups(self.queue):
            yield
        for table in self.tables:
            if table.weight.grad is not None:
                table.weight.grad = None
                refuse_weight(table.name)
        for joined in self._all_joined:
            for call in joined.table.calls:
                call.take_gradient()

    @property
    def prefetches(self) -> bool:
        return self.queue.prefetches

    def prefetch(self, microbatch: Any, following: Any) -> None:
        if self.queue.prefetches:
            self._rows.start(microbatch, following)

    def finish(self, totals: torch.Tensor | None = None) -> None:
        square = exchange_gradients(self._all_joined, self.device).view(1)
        sums = square if totals is None else torch.cat([totals, square])
        super().finish(sums)
        self._square = sums[-1]
        if totals is not None:
            totals.copy_(sums[:-1])

    def norm(self) -> torch.Tensor:
        return (super().norm().square() + self._square * self._factor**2).sqrt()

    def scale(self, factor: float) -> None:
        super().scale(factor)
        self._factor *= factor

    def decides_late(self, optimizer: torch.optim.Optimizer) -> bool:
        return False  # the host scales rows

    def update(self, optimizer: torch.optim.Optimizer, factor: float | StepDecision) -> None:
        assert not isinstance(factor, StepDecision), "decides_late is False"
        before = self._factor
        super().update(optimizer, factor)  # may call `scale`
        self._factor = before * factor
        self._updates.run(optimizer, self._factor)

    def clip_own(self, max_norm: float) -> torch.Tensor:
        raise ModelError(
            "clip_grad_norm_: gradients of tables exist in train steps only. Use run.train_step(max_grad_norm=...)."
        )

    # --- optimizers ---

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.has_adopted(optimizer):
            self._updates.take(optimizer)
        super().adopt(optimizer)

    # --- full tensors ---

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().weights()
        yield from ((table.name, table.full(table.weight)) for table in self.tables)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().gradients()
        yield from ((table.name, table.full(table.dense_gradient() * self._factor)) for table in self.tables)

    def counted_weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from super().counted_weights()
        for table in self.tables:
            if table.cache is None:  # otherwise an update changes rows of the cache, not of the weight
                yield table.weight.detach(), table.axis.size if table.dim is None else 1

    # --- checkpoints ---

    def model_slices(self) -> Iterator[FlatSlice]:
        yield from super().model_slices()
        for table in self.tables:
            table.flush()
            yield from table.slice_of(table.name, table.weight, self.axes)

    def state_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        yield from super().state_slices(optimizer)
        yield from self._updates.slices(optimizer)

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        self.adopt(optimizer)
        super().load_states(optimizer, self._updates.others(optimizer, source))
        self._updates.load(optimizer, source)


def add_tables(model: nn.Module, optimizer: torch.optim.Optimizer, rule: TableOptimizer) -> None:
    """Add a parameter group with the model's tables to an optimizer that lacks them.

    Args:
        model: result of `parallelize`.
        rule: optimizer of the tables.

    Raises:
        ModelError: if the model has no sharded tables, or the optimizer holds one already.
    """
    params = table_weights(model)
    if not params:
        raise ModelError(
            f"tables={rule.name}: the layout shards no embedding table. Pass run.parallelize(model, "
            "layout='user=rows'), or leave tables out."
        )
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if any(id(param) in held for param in params):
        raise ModelError(
            f"tables={rule.name}: the optimizer {type(optimizer).__name__} holds a table already. Build it from "
            "run.dense_parameters(model), or pass its class."
        )
    optimizer.add_param_group(rule.group(params))


def table_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return this rank's parts of the sharded tables of a parallelized model, or []."""
    engine = data_parallel(model)
    return [table.weight for table in engine.tables] if isinstance(engine, TableModel) else []


def table_styles(model: nn.Module) -> dict[str, str]:
    """Return the style of each sharded table of a parallelized model with its reason, by path of the module."""
    engine = data_parallel(model)
    tables = engine.tables if isinstance(engine, TableModel) else []
    return {table.name.rpartition(".")[0]: f"{table.style}: {table.why}" for table in tables}
