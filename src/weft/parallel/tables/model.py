"""Engine of a model with sharded tables: flat buckets for dense parameters, gradients by row for tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.checkpoint.read import Part
from weft.comm.mesh import Mesh
from weft.errors import CheckpointError, ModelError
from weft.memory.offload import Host
from weft.optim.schedule_free import ScheduleFreeAdamW
from weft.optim.step_decision import StepDecision
from weft.optim.table_optimizer import GROUP_KEY, TableOptimizer, dense_equivalent
from weft.parallel.state.flat_slices import FlatSlice, SavedTensor, StateSource, read_full, single_rank_slice
from weft.parallel.state.gradients import data_parallel
from weft.parallel.state.placement import Placement
from weft.parallel.tables.apply import materialize_tables, outside_model
from weft.parallel.tables.exchange import exchange_gradients, mean_squares
from weft.parallel.tables.joined import join_tables
from weft.parallel.tables.lookup import fetch_waiting, open_lookups, refuse_weight
from weft.parallel.tables.row_prefetch import RowPrefetch, next_lookups, start_prefetch
from weft.parallel.tables.table import JoinedTables, Table
from weft.parallel.zero_flat.model import FlatModel

#: State with the number of steps, as torch names it.
_STEP = "step"


@dataclass(slots=True, eq=False)
class TableUpdate:
    """The optimizer of tables: their rule, the group with their learning rate, their states and number of steps.

    Attributes:
        joined: the tables.
        members: those that it updates: all, or one whose group or rule differs from the others'.
        states: states of all rows of `members`, by name.
    """

    joined: JoinedTables
    members: list[Table]
    rule: TableOptimizer
    group: dict[str, Any]
    states: dict[str, torch.Tensor]
    step: int = 0

    def states_of(self, member: Table) -> dict[str, torch.Tensor]:
        """Return the states of the rows of a member, as views."""
        if len(self.members) == 1:
            return self.states
        low, high = self.joined.spans[next(place for place, one in enumerate(self.members) if one is member)]
        return {key: value[low:high] for key, value in self.states.items()}

    def run(self, factor: float) -> None:
        """Update the rows that the step read. All ranks call it. factor: factor of the gradients."""
        self.step += 1
        is_whole = len(self.members) == len(self.joined.members)
        table = self.joined.table if is_whole else self.members[0]
        found = (table.rows, table.grads) if is_whole else self.joined.gradient_of(table) or (None, None)
        rows, grads = found
        if rows is None or grads is None:
            return
        squares = mean_squares(table, grads) if self.rule.needs_mean_squares else None
        grads, squares = grads * factor, None if squares is None else squares * factor**2
        lr = float(self.group["lr"])
        if table.cache is None:
            self.rule.update(
                table.weight.detach(), self.states, rows, grads, lr=lr, step=self.step, mean_squares_R=squares
            )
            return

        def change(tensors: list[torch.Tensor], rows: torch.Tensor, mine: torch.Tensor) -> None:
            weight, *states = tensors
            self.rule.update(
                weight, dict(zip(self.states, states, strict=True)), rows, grads[mine], lr=lr, step=self.step,
                mean_squares_R=None if squares is None else squares[mine],
            )  # fmt: skip

        table.cache.update(rows, list(self.states.values()), change)


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
        self._is_last = False
        self._prefetch: RowPrefetch | None = None  # for the next microbatch
        self._updates: dict[torch.optim.Optimizer, list[TableUpdate]] = {}
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
        self._is_last, self.queue.prefetch, self._prefetch = last, self._prefetch, None
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
        queue = self.queue
        if not queue.prefetches:
            return
        while queue.waiting:
            fetch_waiting(queue)
        lookups, axis = next_lookups(queue.first, microbatch, following), self.tables[0].axis
        self._prefetch = start_prefetch(lookups, axis, self.device, self._is_last)

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
        for update in self._updates[optimizer]:
            update.run(self._factor)

    def clip_own(self, max_norm: float) -> torch.Tensor:
        raise ModelError(
            "clip_grad_norm_: gradients of tables exist in train steps only. Use run.train_step(max_grad_norm=...)."
        )

    # --- optimizers ---

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.has_adopted(optimizer):
            self._take_tables(optimizer)
        super().adopt(optimizer)

    def _take_tables(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the tables out of an optimizer's groups, and create their states."""
        if isinstance(optimizer, ScheduleFreeAdamW):
            raise ModelError(
                "optimizer ScheduleFreeAdamW: it evaluates averages of all rows, and tables change only the rows of a "
                "step. Use AdamW."
            )
        tables = {id(table.weight): table for table in self.tables}
        taken: dict[int, tuple[TableOptimizer, dict[str, Any]]] = {}
        for group in optimizer.param_groups:
            members = [param for param in group["params"] if id(param) in tables]
            if not members:
                continue
            rule = group.get(GROUP_KEY) or dense_equivalent(optimizer, group)
            if not isinstance(rule, TableOptimizer):
                raise ModelError(
                    f"optimizer {type(optimizer).__name__}: with its settings it changes rows of table "
                    f"{tables[id(members[0])].name!r} that a step does not read. Use run.train_step(..., "
                    "tables=weft.TableOptimizer('lazy_adamw', lr=0.001)), or rowwise_adagrad, adagrad or sgd."
                )
            names = group.get("param_names")
            if names is not None:
                group["param_names"] = [
                    name for name, param in zip(names, group["params"], strict=True) if id(param) not in tables
                ]
            group["params"] = [param for param in group["params"] if id(param) not in tables]
            for param in members:
                optimizer.state.pop(param, None)
                taken[id(tables[id(param)])] = rule, group
        self._updates[optimizer] = [update for joined in self._all_joined for update in _updates_of(joined, taken)]

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
        for update in self._updates[optimizer]:
            for table in update.members:
                table.flush()
                for key, value in update.states_of(table).items():
                    yield from table.slice_of(f"{table.name}/{key}", value, self.axes)
                yield single_rank_slice(f"{table.name}/{_STEP}", torch.tensor(float(update.step)), table.axis.ranks[0])

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        self.adopt(optimizer)
        updates = [(update, table) for update in self._updates[optimizer] for table in update.members]
        prefixes = tuple(f"{table.name}/" for _, table in updates)
        super().load_states(optimizer, _Without(source, prefixes))
        for update, table in updates:
            self._load(update, table, source)

    @torch.no_grad()
    def _load(self, update: TableUpdate, table: Table, source: StateSource) -> None:
        table.flush()
        saved = {name for name in source.entries if name.startswith(f"{table.name}/")}
        if not saved and not (update.states and source.entries):  # saved without states, or before the first step
            return
        expected = {f"{table.name}/{key}" for key in (*update.states, _STEP)}
        if saved != expected:
            name = min(saved ^ expected)
            raise CheckpointError(
                f"optimizer state {name!r}: the checkpoint {'has' if name in saved else 'lacks'} it, and the table's "
                f"optimizer is {update.rule.name}. Resume with the optimizer of the run that saved it."
            )
        for key, value in update.states_of(table).items():
            for one in table.slice_of(f"{table.name}/{key}", value, self.axes):
                one.fill(source)
        update.step = int(read_full(source, f"{table.name}/{_STEP}"))


def _updates_of(joined: JoinedTables, taken: Mapping[int, tuple[TableOptimizer, dict[str, Any]]]) -> list[TableUpdate]:
    """Return the optimizers of joined tables: one, or one per table if their groups differ.

    taken: rule and group of the optimizer's tables, by id.
    """
    members = [one for one in joined.members if id(one) in taken]
    groups = {id(taken[id(one)][1]) for one in members}
    if len(groups) == 1 and len(members) == len(joined.members):
        rule, group = taken[id(members[0])]
        return [TableUpdate(joined, members, rule, group, joined.table.states(rule))]
    return [TableUpdate(joined, [one], *taken[id(one)], one.states(taken[id(one)][0])) for one in members]


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


class _Without:
    """A `StateSource` without the entries whose names have one of some prefixes."""

    def __init__(self, source: StateSource, prefixes: tuple[str, ...]):
        self._source, self._prefixes = source, prefixes

    @property
    def entries(self) -> Mapping[str, SavedTensor]:
        """The other entries, by name."""
        return {name: one for name, one in self._source.entries.items() if not name.startswith(self._prefixes)}

    def read(self, name: str, part: Part, start: int, out: memoryview) -> None:
        """Read as the source does."""
        self._source.read(name, part, start, out)
