"""What a training step asks of data parallelism, whatever its stage: one interface, kept with the module.

`parallel/zero/flat/` builds it for zero=0, 1, 2 and `parallel/zero/sharded/` for zero=3.

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

A step that is not taken (a number was not finite) ends after `norm`; the next one starts with `begin_step`.
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
    """What replicas rounded off of gradients and still owe, as whole tensors by name."""

    def stretches(self) -> Iterator[FlatSlice]:
        """Yield what this rank owes, in its own memory; no collective."""
        ...

    def take(self, source: StateSource) -> list[str]:
        """Take over what any plan owed. Returns lines for people."""
        ...


class DataParallel(Protocol):
    """Gradients, master weights and the collectives between them, of one module on one rank.

    Names are those of `module.named_parameters()`: a tied weight has its first name only. A parameter that no rank
    used in a step has a zero gradient, under every stage and number of ranks.

    axes: where the parts lie that this rank holds, and over whom gradients add up. Whole tensors are those of the model
    on one process: parts that techniques cut are joined, those of other stages of a pipeline come too.
    coders: what travels in place of gradients, and what this rank carries of it from step to step. debts: what of that
    any plan can take over.
    """

    axes: AxisMap
    coders: Coders

    @property
    def error_feedback(self) -> ErrorFeedback:
        """What replicas still owe of rounded gradients."""
        ...

    def begin_step(self) -> None:
        """Set gradients to zero from here. A previous step need not have come to its end."""
        ...

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        """Surround forward and backward of one microbatch. Inside the last, gradients may begin to travel."""
        ...

    def finish(self, totals: torch.Tensor | None = None) -> None:
        """Wait until gradients are sums over all data ranks (this rank's shard of them).

        totals: small float64 vector, summed in place over all ranks in the same go.
        """
        ...

    def norm(self) -> torch.Tensor:
        """Return the euclidean norm of the whole gradient after `finish`: 0-d, equal on all ranks.

        Not a number where the sums are not right because ranks disagreed; `check` then says how.
        """
        ...

    def check(self) -> None:
        """Raise CommError on all ranks where ranks disagreed; all ranks call it when `norm` was not finite."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply all gradients, after `finish`."""
        ...

    def decides_late(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether `update` takes the device's decision for this optimizer, so that the host need not wait.

        After `finish`. No: where the optimizer cannot leave a step out by itself or runs on the host, and in the step
        in which a wire begins to carry something to the next.
        """
        ...

    def update(self, optimizer: torch.optim.Optimizer, factor: float | StepDecision) -> None:
        """Let the adopted optimizer take its step with gradients multiplied by a factor, after `finish`.

        With a decision nothing changes in a step that the device does not take; counts of steps are right once the
        decision was read, which the next `update` does, and whatever gives or takes states.
        What `.grad` holds from here on may be without the factor; `gradients` has it.
        """
        ...

    def clip_own(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients to a norm of at most max_norm, in a user's own loop after backward.

        The norm before, of the whole gradient: 0-d, equal on all ranks, which call it together.
        """
        ...

    def publish(self, clip: float = 1.0, follow: bool = False) -> None:
        """Show the new weights to the next forward, on all ranks, after `optimizer.step()`.

        Args:
            clip: what clipping multiplied gradients by.
            follow: after `prefetch_weights`, return before they are there: each block waits for its own when it is
                called, and every method here that reads weights waits for all. Whoever reads parameters calls `arrive`
                before.
        """
        ...

    def prefetch_weights(self) -> None:
        """Let modules wait for their own weights, for `publish(follow=True)`. Call it before the first forward."""
        ...

    def arrive(self) -> None:
        """Wait for weights that follow."""
        ...

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Put shards and master weights in place of the module's parameters in `optimizer.param_groups`.

        Nothing happens where the optimizer is adopted already.

        Raises:
            ModelError: where it has states, or holds a parameter that is not the module's.
        """
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the trainable parameters by name: whole, unrounded (the master's format), in the parameter's shape.

        A collective: all ranks iterate to the end. A tensor may be kept until the next step, but not changed.
        """
        ...

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is not trained and not whole on each rank, by name and whole, in the same manner as `weights`."""
        ...

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the whole gradients by name after `finish` or `publish`, in the same manner as `weights`."""
        ...

    def local_weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's part of the trainable parameters by name, in the master's format and memory.

        May be written to between steps; `publish` then brings it into the parameters of all ranks.
        """
        ...

    def counted_weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield what this rank holds of the trainable weights, with the number of ranks that hold the same.

        In the master's format and memory, which the optimizer changes. No collective.
        """
        ...

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the tensors that this rank's gradients lie in now; no collective. For counting bytes."""
        ...

    def stretches(self) -> Iterator[FlatSlice]:
        """Yield what this rank holds of the model for checkpoints, in its own memory; no collective."""
        ...

    def state_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        """Yield what this rank holds of the adopted optimizer's state, named `parameter/key`, in the same manner."""
        ...

    def load_weights(self, source: StateSource) -> None:
        """Take weights and buffers, masters too, as any plan saved them: this rank reads its stretches. All call it."""
        ...

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        """Give the adopted optimizer the states that any plan saved, in the same manner."""
        ...


class _Attached:
    """Keeps the engine with its module, but out of copies and pickles: a copy of the module is a plain module."""

    def __init__(self, engine: DataParallel, originals: Mapping[str, Original]):
        self.engine = engine
        self.originals = originals

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def attach(model: nn.Module, engine: DataParallel, originals: Mapping[str, Original] | None = None) -> None:
    """Keep the engine with its module, for `data_parallel` and `originals`.

    Args:
        model: the parallelized module.
        engine: of its parameters.
        originals: what the module held before, by name; None: nothing.
    """
    setattr(model, _ATTRIBUTE, _Attached(engine, originals or {}))


def is_attached(model: nn.Module) -> bool:
    """Return whether `parallelize` was called on this module."""
    return getattr(model, _ATTRIBUTE, None) is not None


def originals(model: nn.Module) -> Mapping[str, Original]:
    """Return the tensors that a parallelized module held before, by name."""
    return getattr(model, _ATTRIBUTE).originals


def data_parallel(model: nn.Module) -> DataParallel:
    """Return the engine that `parallelize` made for this module.

    Raises:
        ModelError: where it was not called, or the module is a copy.
    """
    attached = getattr(model, _ATTRIBUTE, None)
    if attached is None:
        raise ModelError(
            f"model of type {type(model).__name__}: it is not parallelized, or is a copy of a parallelized model. "
            f"Call parallelize(model, mesh) first."
        )
    return attached.engine


# Matrices that tensor parallelism has cut, whole for the moment in which an optimizer needs them so.


@dataclass(frozen=True, slots=True)
class ShardedJoin:
    """One cut parameter. device: where collectives work."""

    name: str
    axes: AxisMap
    device: torch.device

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole of something that is cut as the parameter is. A collective over tp."""
        return self.axes.whole(self.name, part.to(self.device))

    def whole_shape(self, part: torch.Tensor) -> tuple[int, ...]:
        """The whole's, the same on all ranks that hold parts of it."""
        return self.axes.whole_shape(self.name, part.shape)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of it."""
        return self.axes.part(self.name, whole)


def join_sharded(
    optimizer: torch.optim.Optimizer,
    params: Iterable[tuple[str, nn.Parameter]],
    axes: AxisMap,
    device: torch.device,
) -> None:
    """Tell an optimizer which of the parameters that it must see whole are cut, and how they are joined.

    Args:
        optimizer: an attribute `joins` says that it can do with parts.
        params: those that this rank updates, by name.
        axes: how parameters are placed.
        device: of the collectives.

    Raises:
        ModelError: where the optimizer cannot do with parts.
    """
    cut = {name: param for name, param in params if axes.is_divided(name)}
    joins = getattr(optimizer, "joins", None)
    if joins is None:
        axes.refuse_sharded(cut, optimizer)
        return
    axes.refuse_sharded((name for name in cut if axes.placement(name).cut != ("tp",)), optimizer)
    joins.clear()
    joins.update((param, ShardedJoin(name, axes, device)) for name, param in cut.items())
