"""Interface between a training step and data parallelism, identical for all ZeRO stages and attached to the module.

`parallel/zero_flat/` implements it for zero=0, 1, 2 and `parallel/zero_sharded/` for zero=3.

One step, driven by `TrainStep`:

    dp.begin_step()
    for index, batch in enumerate(batches):
        with dp.microbatch(last=index == len(batches) - 1):
            loss = ...  # forward
            loss.backward()
    dp.finish(totals)
    norm = dp.norm()
    dp.update(optimizer, factor)
    dp.publish()

A skipped step (non-finite loss or gradients) ends after `norm`. The next one starts with `begin_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from weft.comm.wire.coder import Coders
from weft.errors import ModelError
from weft.optim.step_decision import StepDecision
from weft.parallel.state.flat_slices import FlatSlice, Original, StateSource
from weft.parallel.state.placement import AxisMap

_ATTRIBUTE = "_weft_data_parallel"


class ErrorFeedback(Protocol):
    """Interface of error feedback: pending residuals of rounded gradients, as full tensors by name."""

    def residual_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's residuals as flat slices, without a copy. Local; no communication."""
        ...

    def take(self, source: StateSource) -> list[str]:
        """Load residuals from a checkpoint of any plan. Return log lines about changed residuals."""
        ...


class DataParallel(Protocol):
    """Interface of the ZeRO engines: gradients and master weights of one module on one rank, and their collectives.

    Names are as in `module.named_parameters()`: a tied weight has only its first name. A parameter that no rank used in
    a step has a zero gradient, under every stage and number of ranks. Full tensors are the tensors of the model in one
    process: sharded parts are joined, and other pipeline stages are included.

    `axes` holds the placements of local parts and the axes over which gradients are summed.
    """

    axes: AxisMap

    @property
    def coders(self) -> Coders:
        """Coders of communicated gradients, with this rank's state."""
        ...

    @property
    def error_feedback(self) -> ErrorFeedback:
        """Pending error feedback of rounded gradients."""
        ...

    def begin_step(self) -> None:
        """Drop all gradients. The previous step may be incomplete."""
        ...

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Return the context for forward and backward of a microbatch. last: True for the last one of a step."""
        ...

    @property
    def prefetches(self) -> bool:
        """True if `prefetch` does something."""
        ...

    def prefetch(self, microbatch: Any, following: Any) -> None:
        """Begin to fetch data of other ranks for the next microbatch. All ranks call it after each forward.

        Args:
            microbatch: this microbatch.
            following: the next microbatch, or None if it is unknown.
        """
        ...

    def finish(self, totals: torch.Tensor | None = None) -> None:
        """Wait until gradients are sums over all data ranks; each rank has its shard of the sums.

        `totals` is a small float64 vector that is summed in place over all ranks in the same collective.
        """
        ...

    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the full gradient after `finish`: 0-d, equal on all ranks.

        NaN if sums are wrong because a gradient arrived after its reduction had started. `check` then raises an error.
        """
        ...

    def check(self) -> None:
        """Raise CommError on all ranks if a gradient arrived after its reduction had started, so that sums are wrong.

        All ranks call it if `norm` was not finite.
        """
        ...

    def scale(self, factor: float) -> None:
        """Multiply all gradients, after `finish`."""
        ...

    def decides_late(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `update` accepts a decision on the device for this optimizer, so that the host need not wait.

        Call it after `finish`. False if the optimizer cannot skip a step or runs on the host, if gradients use error
        feedback, and in the step in which a wire format begins to carry state.
        """
        ...

    def update(self, optimizer: torch.optim.Optimizer, factor: float | StepDecision) -> None:
        """Run the step of the optimizer with gradients multiplied by a factor, after `finish`.

        With a `StepDecision`, nothing changes in a step that the device skips. Step counts are corrected when the
        decision is read, by the next `update` or by any method that saves or loads states. After this call `.grad` may
        lack the factor; `gradients` includes it.
        """
        ...

    def clip_own(self, max_norm: float) -> torch.Tensor:
        """Clip all gradients to a norm of at most max_norm, in a custom training loop after backward.

        All ranks call it together. Returns the norm of the full gradient before clipping: 0-d, equal on all ranks.
        """
        ...

    def publish(self, clip: float = 1.0, follow: bool = False) -> None:
        """Publish the new weights to the next forward on all ranks, after `optimizer.step()`.

        clip: factor by which gradients were clipped, for error feedback. follow: after `prefetch_weights`, return
        before the weights arrive. Each block waits for its own weights when it is called, and methods that read weights
        wait for all. Call `wait_for_weights` before reading parameters.
        """
        ...

    def prefetch_weights(self) -> None:
        """Make modules wait for their own weights, for `publish(follow=True)`. Call it before the first forward."""
        ...

    def wait_for_weights(self) -> None:
        """Wait for all pending weights."""
        ...

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Put shards and master weights in place of the module's parameters in `optimizer.param_groups`.

        Existing optimizer states are replaced by this rank's part. Does nothing if the optimizer was adopted before.
        All ranks call it. Raises ModelError if the optimizer has a trainable parameter of another module, is an LBFGS,
        or needs full matrices that it cannot gather.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trainable parameters by name: full, in the master dtype, in the parameter's shape.

        Collective: all ranks iterate to the end. A tensor may be kept until the next step, but not modified.
        """
        ...

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield frozen parameters and buffers of which a rank may have only a part, or none, by name and in full.

        The rules of `weights` apply.
        """
        ...

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full gradients by name after `finish` or `publish`, under the rules of `weights`."""
        ...

    def local_weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the trainable parameters by name: the master weights themselves, not copies.

        They may be modified between steps. `publish` then copies them into the parameters of all ranks.
        """
        ...

    def counted_weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield this rank's parts of the trainable weights, with the number of ranks that hold the same part.

        These are the master weights that the optimizer modifies, not copies. Local; no communication.
        """
        ...

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the tensors that currently store this rank's gradients, to count bytes. Local; no communication."""
        ...

    def model_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the model for checkpoints, as views if possible. No communication."""
        ...

    def state_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the adopted optimizer's state (`parameter/key`), like `model_slices`."""
        ...

    def load_weights(self, source: StateSource) -> None:
        """Load weights, buffers and master weights from a checkpoint of any plan. All ranks call it.

        Each rank reads its slices.
        """
        ...

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        """Load the adopted optimizer's states from a checkpoint of any plan, like `load_weights`."""
        ...


class NotCopied:
    """Attribute of a module that becomes None in copies and pickles of the module, so that they are plain modules."""

    def __init__(self, value: Any):
        self.value = value

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def attach(model: nn.Module, engine: DataParallel, originals: Mapping[str, Original] | None = None) -> None:
    """Set the engine and the entries of the plain module's state_dict as an attribute of the module.

    `data_parallel` and `originals` read them.
    """
    setattr(model, _ATTRIBUTE, NotCopied((engine, originals or {})))


def is_attached(model: nn.Module) -> bool:
    """Return True if `parallelize` was called on this module, False for a copy of it."""
    return getattr(model, _ATTRIBUTE, None) is not None


def originals(model: nn.Module) -> Mapping[str, Original]:
    """Return an `Original` for each state_dict entry of the model before it was parallelized, by name."""
    return getattr(model, _ATTRIBUTE).value[1]


def data_parallel(model: nn.Module) -> DataParallel:
    """Return the engine that `parallelize` made for this module. Raises ModelError if it has none, as in a copy."""
    attached = getattr(model, _ATTRIBUTE, None)
    if attached is None:
        raise ModelError(
            f"model of type {type(model).__name__}: it is not parallelized, or is a copy of a parallelized model. "
            f"Call parallelize(model, mesh) first."
        )
    return attached.value[0]


# Matrices sharded by tensor parallelism, gathered temporarily for optimizers that need full matrices.


@dataclass(frozen=True, slots=True)
class ShardedJoin:
    """Gathers one sharded parameter. `device` is the device of the collectives."""

    name: str
    axes: AxisMap
    device: torch.device

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the full tensor of a part that is sharded like the parameter. Collective over the sharding axis."""
        return self.axes.full_tensor(self.name, part.to(self.device))

    def full_shape(self, part: torch.Tensor) -> tuple[int, ...]:
        """Return the full shape of a part, equal on all ranks that hold parts."""
        return self.axes.full_shape(self.name, part.shape)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        return self.axes.part(self.name, whole)


def join_sharded(
    optimizer: torch.optim.Optimizer, params: Iterable[tuple[str, nn.Parameter]], axes: AxisMap, device: torch.device
) -> None:
    """Give a `ShardedJoin` for each sharded parameter in `params` to an optimizer that needs full matrices.

    optimizer: its dict `joins`, if it has one, is replaced by {parameter: `ShardedJoin`}. params: parameters that it
    updates in full. Raises ModelError if one is sharded and the optimizer has no `joins`, or one is sharded over
    other axes than tp.
    """
    cut = {name: param for name, param in params if axes.is_divided(name)}
    joins = getattr(optimizer, "joins", None)
    if joins is None:
        axes.refuse_sharded(cut, optimizer)
        return
    axes.refuse_sharded((name for name in cut if axes.placement(name).cut != ("tp",)), optimizer)
    joins.clear()
    joins.update((param, ShardedJoin(name, axes, device)) for name, param in cut.items())
