"""Optimizer of plain PyTorch for models with embedding tables: the reference of sharded tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from weft.config.fields.layout import Layout
from weft.config.sections import OptimizerSection
from weft.config.table_section import TableSection
from weft.optim.build import build_optimizer
from weft.optim.table_optimizer import TableOptimizer
from weft.parallel.state.gradients import is_attached
from weft.parallel.tables.model import add_tables, table_weights


def tables_of(model: nn.Module, layout: Layout) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """Return the embedding tables of a plain model that a layout names, by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and layout.match(path) is not None
    }


class PlainTables:
    """Steps the rows of full tables that forwards have read since the last step, and other parameters as usual.

    Args:
        dense: optimizer of the other parameters.
        tables: the tables by path.
        rule: their optimizer.
    """

    def __init__(
        self, dense: torch.optim.Optimizer, tables: Mapping[str, nn.Embedding | nn.EmbeddingBag], rule: TableOptimizer
    ):
        self._dense, self._tables, self._rule, self._step = dense, tables, rule, 0
        self._states = {path: rule.states(module.weight.detach()) for path, module in tables.items()}
        self._read: dict[str, list[torch.Tensor]] = {path: [] for path in tables}
        for path, module in tables.items():
            module.register_forward_pre_hook(_recorder(self._read[path]))

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        self._dense.step()
        self._step += 1
        for path, module in self._tables.items():
            rows = torch.cat([ids.flatten() for ids in self._read[path]]).unique()
            rows = rows if module.padding_idx is None else rows[rows != module.padding_idx]
            grad = module.weight.grad
            assert grad is not None
            squares = grad[rows].square().mean(1) if self._rule.needs_mean_squares else None
            self._rule.update(
                module.weight, self._states[path], rows, grad[rows], lr=self._rule.lr, step=self._step,
                mean_squares_R=squares,
            )  # fmt: skip
            self._read[path].clear()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._dense.zero_grad()
        for module in self._tables.values():
            module.weight.grad = None


def _recorder(read: list[torch.Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """Return a hook that appends the ids of a forward to `read`."""

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        read.append(args[0].detach())

    return record


def optimizer_with_tables(
    model: nn.Module, settings: OptimizerSection, table_settings: TableSection, layout: Layout | None
) -> torch.optim.Optimizer:
    """Return the optimizer of a model whose embedding tables have their own: sharded, or those that a layout names."""
    sharded, plain = table_weights(model) if is_attached(model) else [], dict[str, nn.Embedding | nn.EmbeddingBag]()
    if layout is not None and layout.is_of_tables and not sharded:
        plain = tables_of(model, layout)
    tables = {id(weight) for weight in (*sharded, *(module.weight for module in plain.values()))}
    optimizer = build_optimizer(
        [(name, param) for name, param in model.named_parameters() if id(param) not in tables], settings
    )
    own = table_settings
    rule = TableOptimizer(own.optimizer, own.lr, own.betas, own.eps, own.weight_decay)
    if sharded:
        add_tables(model, optimizer, rule)
    return cast("torch.optim.Optimizer", PlainTables(optimizer, plain, rule)) if plain else optimizer
