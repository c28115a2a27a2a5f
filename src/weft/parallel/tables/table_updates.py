"""Optimizers of tables: one update for joined tables of one group, with its states in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.checkpoint.read import Part
from weft.errors import CheckpointError, ModelError
from weft.optim.schedule_free import ScheduleFreeAdamW
from weft.optim.table_optimizer import GROUP_KEY, TableOptimizer, dense_equivalent
from weft.parallel.state.flat_slices import FlatSlice, SavedTensor, StateSource, read_full, single_rank_slice
from weft.parallel.state.placement import AxisMap
from weft.parallel.tables.exchange import mean_squares
from weft.parallel.tables.table import JoinedTables, Table

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


class TableUpdates:
    """Updates of tables by the optimizers that hold them.

    Args:
        all_joined: all tables of a model.
        axes: the axes of the model.
    """

    def __init__(self, all_joined: Sequence[JoinedTables], axes: AxisMap):
        self._all_joined, self._axes = all_joined, axes
        self._updates: dict[torch.optim.Optimizer, list[TableUpdate]] = {}

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the tables out of an optimizer's groups, and create their states.

        Raises:
            ModelError: if the optimizer changes rows that a step does not read.
        """
        if isinstance(optimizer, ScheduleFreeAdamW):
            raise ModelError(
                "optimizer ScheduleFreeAdamW: it evaluates averages of all rows, and tables change only the rows of a "
                "step. Use AdamW."
            )
        tables = {id(table.weight): table for joined in self._all_joined for table in joined.members}
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

    def run(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Update the rows that the step read. All ranks call it. factor: factor of the gradients."""
        for update in self._updates[optimizer]:
            update.run(factor)

    def slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        """Yield this rank's states as flat slices."""
        for update in self._updates[optimizer]:
            for table in update.members:
                table.flush()
                for key, value in update.states_of(table).items():
                    yield from table.slice_of(f"{table.name}/{key}", value, self._axes)
                yield single_rank_slice(f"{table.name}/{_STEP}", torch.tensor(float(update.step)), table.axis.ranks[0])

    def others(self, optimizer: torch.optim.Optimizer, source: StateSource) -> StateSource:
        """Return a source without the states of tables."""
        names = [table.name for update in self._updates[optimizer] for table in update.members]
        return _Without(source, tuple(f"{name}/" for name in names))

    @torch.no_grad()
    def load(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        """Load the states of tables. Raises CheckpointError if they belong to another optimizer."""
        for update in self._updates[optimizer]:
            for table in update.members:
                _load(update, table, source, self._axes)


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


def _load(update: TableUpdate, table: Table, source: StateSource, axes: AxisMap) -> None:
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
        for one in table.slice_of(f"{table.name}/{key}", value, axes):
            one.fill(source)
    update.step = int(read_full(source, f"{table.name}/{_STEP}"))


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
