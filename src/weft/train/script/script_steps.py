"""The steps of a custom script, and parts of a custom loop: a base class of `weft.Run`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.errors import ConfigError, PlanError, did_you_mean
from weft.monitor.guards import GarbageTurns
from weft.optim.build import options_of
from weft.optim.table_optimizer import TableOptimizer
from weft.parallel.local_means import global_mean, trust_loss
from weft.parallel.state.gradients import data_parallel
from weft.parallel.tables.model import add_tables, table_styles, table_weights
from weft.privacy.settings import Privacy
from weft.privacy.update import PrivateUpdate
from weft.train.batches.microbatches import ForwardFn
from weft.train.losses import LossFn
from weft.train.step.train_step import TrainStep


class ScriptSteps:
    """Builds `TrainStep`s, and computes losses and gradient norms of a custom loop over all ranks."""

    mesh: Mesh
    #: Models that this run parallelized.
    _models: weakref.WeakSet[nn.Module]
    #: True if the caller of `shard` skips placeholder batches.
    _leaves_out: bool = False

    def train_step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer],
        loss_fn: LossFn,
        *,
        forward: ForwardFn | None = None,
        max_grad_norm: float | None = 0.0,
        weights_follow: bool = False,
        check_batch: bool = True,
        tables: TableOptimizer | None = None,
        privacy: Privacy | None = None,
        **optimizer_options: Any,
    ) -> TrainStep:
        """Return a `TrainStep`, which trains on one batch per call: `metrics = step(batch)`.

        Args:
            model: the result of `parallelize`.
            optimizer: a class such as torch.optim.AdamW, which is built here, or an optimizer of the parallelized
                model.
            loss_fn: loss_fn(output, batch) -> (sum of losses, number of tokens or samples). Under precision=bf16, fp16
                and fp8 it gets the output in float32.
            forward: forward(model, batch) -> output. By default the model gets x of (x, y) and [x, y], and the entries
                of a dict except labels by name.
            max_grad_norm: norm to which the full gradient is clipped; 0 or None for no clipping.
            weights_follow: under zero=1 and 2, return from a step before new weights are gathered; see `TrainStep`.
            check_batch: run a few samples several times in the first step, and warn if results depend on how the plan
                divides a batch: interaction between samples, noise, or buffers that forward changes.
            tables: optimizer of the embedding tables that the layout shards. None uses `optimizer` for them, if it
                leaves rows without a gradient unchanged: SGD without momentum, or Adagrad.
            privacy: clip the gradient of each sample to `privacy.clip` and add noise. Take the batches from
                `run.private_batches`, which draws the samples of each step.
            **optimizer_options: options of the class, such as lr=3e-4.

        Raises:
            PlanError: if the class does not accept the options, if options are passed with a built optimizer, or if
                `max_grad_norm` is negative.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            _check_options(optimizer, optimizer_options)
            # Pass a group, because a pipeline stage may have no trained parameters, and torch rejects an empty list.
            params = model.parameters() if tables is None else self.dense_parameters(model)
            trained = [{"params": [param for param in params if param.requires_grad]}]
            optimizer = optimizer(trained, **optimizer_options)
        elif optimizer_options:
            names = ", ".join(optimizer_options)
            raise PlanError(f"{names}: the optimizer is built already. Give its class, or leave these out.")
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise PlanError(f"max_grad_norm={max_grad_norm}: a norm is 0 or more. Use 1.0, or None for no clipping.")
        if tables is not None:
            add_tables(model, optimizer, tables)
        self._leaves_out = True
        options: dict[str, Any] = {"max_grad_norm": max_grad_norm or 0.0, "weights_follow": weights_follow}
        if privacy is not None:
            if table_weights(model):
                raise PlanError(
                    "privacy: the rows of sharded tables are not clipped by sample. Leave the tables out of layout."
                )
            options["privacy"] = PrivateUpdate(privacy, self.mesh, max_grad_norm=max_grad_norm)
        return TrainStep(model, optimizer, loss_fn, self.mesh, forward=forward, check_batch=check_batch, **options)

    def dense_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of a parallelized model except the embedding tables that the layout shards."""
        tables = {id(param) for param in table_weights(model)}
        return [param for param in model.parameters() if id(param) not in tables]

    def table_styles(self, model: nn.Module) -> dict[str, str]:
        """Return the style of each sharded embedding table with its reason, by path: style auto chooses them."""
        return table_styles(model)

    def clip_grad_norm_(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Clip gradients under any plan, in a custom loop between backward() and optimizer.step().

        Computes the norm of the full gradient, including parts that tp, ep and zero=3 shard, where torch's function
        uses only this rank's part. Returns the norm before clipping, a 0-d tensor that is equal on all ranks. All ranks
        must call it.
        """
        return data_parallel(model).clip_own(max_norm)

    def global_mean(self, loss_sum: torch.Tensor, num_tokens: torch.Tensor | int) -> torch.Tensor:
        """Return the loss for `backward()` in a custom loop: the mean over all ranks' tokens. All ranks must call it.

        Args:
            loss_sum: sum over this rank's tokens or samples, 0-d.
            num_tokens: number of this rank's tokens or samples.
        """
        for model in self._models:
            trust_loss(model)
        return global_mean(loss_sum, num_tokens, self.mesh)

    def collect_garbage(self, every: int = 50) -> GarbageTurns:
        """Run Python's garbage collector at the same step on all ranks, so that ranks do not wait for each other.

        Use `with run.collect_garbage() as garbage:` around the loop, and `garbage.after_step()` after each step.
        Leaving the block restores the collector's previous state.

        Args:
            every: steps between collections.

        Raises:
            ConfigError: if `every` is not a number of steps.
        """
        if every < 1:
            raise ConfigError(f"every={every}: garbage is collected every N steps, with N at least 1. Use every=50.")
        return GarbageTurns(every)


def _check_options(optimizer: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
    known = options_of(optimizer)
    if known is None:
        return
    named, listed = getattr(optimizer, "__name__", str(optimizer)), ", ".join(known)
    # A misspelled argument of train_step ends up here too.
    hints = {
        name: did_you_mean(name, [*known, "forward", "max_grad_norm", "check_batch"]) or f" Use some of {listed}."
        for name in options
        if name not in known
    }
    if hints:
        raise PlanError("\n".join(f"{n}={options[n]}: {named} has no such option.{hint}" for n, hint in hints.items()))
