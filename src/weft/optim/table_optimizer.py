"""Optimizers of embedding tables, which change only the rows that a step has read.

R unique rows of a step, D columns of a table on this rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import ConfigError, did_you_mean

#: Names of the optimizers.
TABLE_OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "lazy_adamw")
#: Key of a parameter group with the `TableOptimizer` of its tables.
GROUP_KEY = "tables"


@dataclass(frozen=True, slots=True)
class TableOptimizer:
    """Algorithm and settings for the rows of tables.

    - sgd: SGD without momentum, as torch.optim.SGD.
    - adagrad: as torch.optim.Adagrad.
    - rowwise_adagrad: Adagrad with one sum per row, of the mean squared gradient over the row's columns.
    - lazy_adamw: AdamW whose moments and decay change only for rows that are read. The bias correction counts all
      steps, as in torch.optim.SparseAdam.

    Attributes:
        name: one of TABLE_OPTIMIZERS.
        lr: peak learning rate.
        betas: decay rates of lazy_adamw's moments.
        eps: added to the root of the squared gradients.
        weight_decay: decoupled weight decay of lazy_adamw, for rows that are read.

    Raises:
        ConfigError: for an unknown name, or a setting out of range.
    """

    name: str
    lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in TABLE_OPTIMIZERS:
            hint = did_you_mean(self.name, TABLE_OPTIMIZERS) or f" Use one of {', '.join(TABLE_OPTIMIZERS)}."
            raise ConfigError(f"tables={self.name}: no optimizer of tables has this name.{hint}")
        if self.weight_decay and self.name != "lazy_adamw":
            raise ConfigError(
                f"weight_decay={self.weight_decay}: {self.name} does not decay the rows of tables. Use weight_decay=0, "
                "or lazy_adamw."
            )
        if self.lr < 0 or self.eps < 0 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"tables={self.name}: lr={self.lr} and eps={self.eps} must be at least 0, and betas={self.betas} in "
                "[0, 1). Use lr=0.02."
            )

    def group(self, params: list[nn.Parameter]) -> dict[str, Any]:
        """Return a parameter group of tables. Schedulers may change its `lr`."""
        return {"params": params, "lr": self.lr, "initial_lr": self.lr, GROUP_KEY: self}

    @property
    def needs_mean_squares(self) -> bool:
        """True if `update` needs the mean squared gradient over all columns of a row."""
        return self.name == "rowwise_adagrad"

    def states(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the initial states of a table's part by name, each with the part's shape or one number per row."""
        match self.name:
            case "adagrad":
                return {"sum": torch.zeros_like(weight)}
            case "rowwise_adagrad":
                return {"row_sum": weight.new_zeros(weight.shape[0])}
            case "lazy_adamw":
                return {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
            case _:
                return {}

    @torch.no_grad()
    def update(
        self,
        weight: Tensor,
        states: dict[str, Tensor],
        rows_R: Tensor,
        grads_RD: Tensor,
        *,
        lr: float,
        step: int,
        mean_squares_R: Tensor | None = None,
    ) -> None:
        """Update the rows of a table's part and its states.

        Args:
            weight: the part, (rows, D).
            states: its states, from `states`.
            rows_R: indices of the rows that were read, each once.
            grads_RD: their gradients.
            lr: learning rate of the step.
            step: number of the step, from 1.
            mean_squares_R: mean squared gradients over all columns, if `needs_mean_squares`.
        """
        match self.name:
            case "sgd":
                change = grads_RD
            case "adagrad":
                sums_RD = _add(states["sum"], rows_R, grads_RD.square())
                change = grads_RD / sums_RD.sqrt_().add_(self.eps)
            case "rowwise_adagrad":
                assert mean_squares_R is not None
                sums_R = _add(states["row_sum"], rows_R, mean_squares_R)
                change = grads_RD / sums_R.sqrt_().add_(self.eps)[:, None]
            case _:
                change = self._adam_change(weight, states, rows_R, grads_RD, lr, step)
        _add(weight, rows_R, change, -lr)

    def _adam_change(
        self, weight: Tensor, states: dict[str, Tensor], rows_R: Tensor, grads_RD: Tensor, lr: float, step: int
    ) -> Tensor:
        first, second = self.betas
        means_RD = states["exp_avg"].index_select(0, rows_R).lerp_(grads_RD, 1 - first)
        squares_RD = states["exp_avg_sq"].index_select(0, rows_R).mul_(second)
        squares_RD.addcmul_(grads_RD, grads_RD, value=1 - second)
        states["exp_avg"].index_copy_(0, rows_R, means_RD)
        states["exp_avg_sq"].index_copy_(0, rows_R, squares_RD)
        roots_RD = squares_RD.div_(1 - second**step).sqrt_().add_(self.eps)
        change = means_RD.div_(1 - first**step).div_(roots_RD)
        # The decay is a part of the change: w - lr * (change + decay * w).
        return change.add_(weight.index_select(0, rows_R), alpha=self.weight_decay) if self.weight_decay else change


def _add(tensor: Tensor, rows_R: Tensor, values: Tensor, factor: float = 1.0) -> Tensor:
    """Add values times a factor to unique rows of a tensor, and return the new rows."""
    found = tensor.index_select(0, rows_R).add_(values, alpha=factor)
    tensor.index_copy_(0, rows_R, found)  # index_add_ is slower on CPUs, because rows could repeat
    return found


def dense_equivalent(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> TableOptimizer | None:
    """Return the table optimizer with the numbers of a dense optimizer, or None if no table optimizer has them.

    A dense optimizer must leave rows without a gradient unchanged.

    Args:
        group: the parameter group of the tables.
    """
    if group.get("weight_decay") or group.get("maximize"):
        return None
    if type(optimizer) is torch.optim.SGD and not group["momentum"]:
        return TableOptimizer("sgd", lr=float(group["lr"]))
    if type(optimizer) is torch.optim.Adagrad and not (group["lr_decay"] or group["initial_accumulator_value"]):
        return dataclasses.replace(TableOptimizer("adagrad", lr=float(group["lr"])), eps=group["eps"])
    return None
