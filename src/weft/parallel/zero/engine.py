"""Base of the ZeRO engines: phases of a step, gradient reduction, and wrapping of optimizers.

A step has one of two drivers. `TrainStep` calls the methods in the order that `weft.parallel.state.gradients`
shows. In a custom training loop, hooks of backward and of the optimizer's step call them: they complete the gradients
before the step, and publish the new weights to all ranks after it.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum, auto
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.comm.mesh import Mesh
from weft.comm.wire.coder import Coders
from weft.errors import ModelError
from weft.memory.offload import step_on_host
from weft.optim.step_decision import DecidedOptimizer, StepDecision
from weft.parallel.private_torch import optimizer_step_hooks
from weft.parallel.state.flat_slices import StateSource
from weft.parallel.state.gradients import DataParallel, ErrorFeedback
from weft.parallel.state.materialize import Materialise, check_same_model, guard_optimizer
from weft.parallel.state.placement import AxisMap, Placement
from weft.parallel.state.precision import Precision
from weft.parallel.zero.states import across_stages
from weft.private_torch import foreach_mul_


class Phase(IntEnum):
    """Phase of a module's gradients. From ACCUMULATE on, TrainStep drives the step."""

    IDLE = auto()
    #: Forward and backward in a custom training loop, in which gradients are means over the ranks.
    OWN_BACKWARD = auto()
    #: The optimizer steps in a custom training loop.
    OWN_UPDATE = auto()
    #: Between `begin_step` and the last microbatch, outside microbatches. A failed step stays in this phase.
    ACCUMULATE = auto()
    #: A microbatch that is not the last one.
    INNER_PASS = auto()
    LAST_PASS = auto()
    #: The last microbatch ended.
    PASSES_DONE = auto()
    #: Gradients are sums over the ranks. `.grad` may not be set yet.
    REDUCED = auto()
    #: The optimizer can read `.grad`.
    READY = auto()
    UPDATE = auto()

    @property
    def in_step(self) -> bool:
        """True while TrainStep drives the step: from `begin_step` to `publish`."""
        return self >= Phase.ACCUMULATE

    @property
    def in_pass(self) -> bool:
        """True inside a microbatch."""
        return self is Phase.INNER_PASS or self is Phase.LAST_PASS

    @property
    def is_unreduced(self) -> bool:
        """True if gradients may differ from the sums or means over all ranks."""
        return self is Phase.OWN_BACKWARD or Phase.ACCUMULATE <= self <= Phase.PASSES_DONE

    @property
    def is_update(self) -> bool:
        """True from the optimizer's step until the weights are published."""
        return self is Phase.UPDATE or self is Phase.OWN_UPDATE


class GradientReducer(ABC):
    """Reduces the gradients of one module over the ranks, and stores the phase of its step."""

    coders: Coders
    error_feedback: ErrorFeedback

    def __init__(self) -> None:
        self.phase = Phase.IDLE

    @abstractmethod
    def begin_step(self) -> None:
        """Drop all gradients, including gradients of a failed step."""

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Set the phase during forward and backward of one microbatch, which run in this context."""
        self._begin_pass(last)
        self.phase, completed = Phase.LAST_PASS if last else Phase.INNER_PASS, False
        try:
            yield
            completed = True
        finally:
            self.phase = Phase.PASSES_DONE if last and completed else Phase.ACCUMULATE
            self._end_pass(last, completed)

    @abstractmethod
    def _begin_pass(self, last: bool) -> None: ...

    @abstractmethod
    def _end_pass(self, last: bool, completed: bool) -> None: ...

    @abstractmethod
    def finish(self, totals: torch.Tensor | None) -> None:
        """Wait until all gradients are sums over the ranks, and sum `totals` over all ranks in place."""

    @abstractmethod
    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the full gradient, 0-d float64, equal on all ranks."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""


class ZeroEngine(DataParallel, ABC):
    """Methods that both ZeRO engines share.

    A subclass sets `reducer`, and `updates_on_host` to True if optimizers step parameters in host memory.
    placements: placements of parameters that techniques changed, by name.
    """

    reducer: GradientReducer
    updates_on_host = False

    def __init__(self, mesh: Mesh, placements: Mapping[str, Placement] | None, *, sharded: bool):
        self.device = mesh.device
        self.precision = Precision.of(mesh.plan)
        self.axes = AxisMap(mesh, placements or {}, sharded=sharded)

    @property
    def prefetches(self) -> bool:
        return False

    def prefetch(self, microbatch: Any, following: Any) -> None:
        """Do nothing. Tables override it."""

    def _materialise(self, model: nn.Module, seed: int | None, filled_later: bool) -> Materialise:
        """Check the model on all ranks, and return the object that materializes its meta parameters."""
        self.axes.check_names(model)
        materialise = Materialise(model, self.axes, seed, self.device, filled_later)
        check_same_model(model, self.axes, self.device)
        return materialise

    @property
    def coders(self) -> Coders:
        return self.reducer.coders

    @property
    def error_feedback(self) -> ErrorFeedback:
        return self.reducer.error_feedback

    @property
    def in_step(self) -> bool:
        """True while TrainStep drives the step."""
        return self.reducer.phase.in_step

    def leave_step(self) -> None:
        """Set the phase to IDLE at the end of a step, unless gradients of a custom loop's backward are unreduced."""
        if self.reducer.phase is not Phase.OWN_BACKWARD:
            self.reducer.phase = Phase.IDLE

    def _begin_update(self) -> None:
        self.reducer.phase = Phase.UPDATE

    def norm(self) -> torch.Tensor:
        return self.reducer.norm()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        if self.has_adopted(optimizer):
            return
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ModelError("optimizer LBFGS: it calls the model inside its step. Use another optimizer.")
        self._put_shards(optimizer)
        if self.updates_on_host:
            step_on_host(optimizer)
        self._watch(optimizer)
        guard_optimizer(optimizer, self.axes)

    @abstractmethod
    def has_adopted(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `adopt` was called with this optimizer."""

    @abstractmethod
    def owns_some(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer holds parameters of the module."""

    @abstractmethod
    def finalize(self) -> None:
        """Set the gradients that the optimizer reads, when it steps in a custom training loop."""

    @abstractmethod
    def _put_shards(self, optimizer: torch.optim.Optimizer) -> None: ...

    @abstractmethod
    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks before and after the optimizer's step."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._joined(self._full_weights())

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._joined(self._full_frozen())

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._joined(self._full_gradients())

    def _joined(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors, gathered over tp and ep, of all pipeline stages."""
        return across_stages(self.axes.named(tensors), self.axes.stages, self.device)

    @abstractmethod
    def _full_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def _full_frozen(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def _full_gradients(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    @torch.no_grad()
    def load_weights(self, source: StateSource) -> None:
        for one in self.model_slices():
            one.fill(source)


Engine = TypeVar("Engine", bound=ZeroEngine)


def watch_steps(
    optimizer: torch.optim.Optimizer,
    engine: weakref.ref[Engine],
    *,
    clear: Callable[[Engine], None],
    before: Callable[[torch.optim.Optimizer], None] | None = None,
    after: Callable[[torch.optim.Optimizer], None] | None = None,
) -> None:
    """Make hooks on the optimizer complete gradients before its step and publish weights after it.

    They do so only if TrainStep does not drive the step. A step with a closure then raises ModelError.

    Args:
        engine: weak reference to the engine. Without the engine, only `before` and `after` are called.
        clear: called with the engine in the optimizer's `zero_grad`, after the default.
        before: called directly before every step of the optimizer, also under TrainStep.
        after: called directly after every step, also under TrainStep, before weights are published.
    """

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = engine()
        if found is not None and not found.in_step:
            if any(arg is not None for arg in (*args[1:], kwargs.get("closure"))):
                raise ModelError(
                    f"optimizer {type(optimizer).__name__}: a closure computes gradients inside step(), where "
                    "ranks cannot communicate. Call backward() first, then step()."
                )
            found.finalize()
        if before is not None:
            before(optimizer)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if after is not None:
            after(optimizer)
        found = engine()
        if found is not None and not found.in_step:
            found.publish()

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)
    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        if (found := engine()) is not None:
            clear(found)

    optimizer.zero_grad = zero_all


class _Finder:
    """Hook that adopts an optimizer of the module's parameters at its first step, if the user did not register it.

    Without this, the weights of the ranks would diverge silently.
    """

    def __init__(self, engine: Callable[[], ZeroEngine | None]):
        self.engine = engine

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        found = self.engine()
        if found is not None and not found.has_adopted(optimizer) and found.owns_some(optimizer):
            found.adopt(optimizer)


def find_optimizers(engine: Callable[[], ZeroEngine | None]) -> None:
    """Watch for optimizers of the engine's parameters, and adopt them at their first step.

    Hooks of engines that no longer exist are removed here, because hooks must not change while an optimizer steps.
    """
    hooks = optimizer_step_hooks()
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Finder) and hook.engine() is None]:
        del hooks[key]
    register_optimizer_step_pre_hook(_Finder(engine))


# Rules by which both engines adopt an optimizer that was created with a module's parameters.

#: torch optimizers whose update of an element depends only on that element's gradient and state.
ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)

#: Optimizers whose fused kernels skip a step, including their step counts, if a flag on the device is set.
_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})


def leaves_steps_out(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `step_by_decision` supports this optimizer with its current settings."""
    if isinstance(optimizer, DecidedOptimizer):
        return True
    return type(optimizer) in _FUSED and all(group.get("fused") for group in optimizer.param_groups)


def steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `step_by_decision` can step some parameters before the others."""
    return type(optimizer) in _FUSED


@torch.no_grad()
def step_by_decision(
    optimizer: torch.optim.Optimizer,
    decision: StepDecision,
    first: Collection[int] = (),
    between: Callable[[], None] | None = None,
) -> None:
    """Multiply gradients by the decision's factor in place, and run a step unless the device decides to skip it.

    Args:
        optimizer: optimizer for which `leaves_steps_out` is True.
        first: ids of parameters to step before the others; empty to step all together. A `DecidedOptimizer` ignores it.
        between: called between the two parts of the step, if `first` is not empty. It is required then.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for param in params:
        if param.grad is not None:
            by_dtype.setdefault(param.grad.dtype, []).append(param.grad)
    for dtype, grads in by_dtype.items():
        foreach_mul_(grads, decision.factor_for(dtype))
    if isinstance(optimizer, DecidedOptimizer):
        with optimizer.decided(decision):
            optimizer.step()
        return
    # The same flag that torch's GradScaler sets on fused optimizers.
    optimizer.__dict__["found_inf"] = (~decision.is_taken).float()
    try:
        if first and between is not None:
            with _without_grads(param for param in params if id(param) not in first):
                optimizer.step()
            between()
        with _without_grads(param for param in params if id(param) in first):
            optimizer.step()
    finally:
        del optimizer.__dict__["found_inf"]


@contextmanager
def _without_grads(params: Iterable[torch.Tensor]) -> Iterator[None]:
    grads = [(param, param.grad) for param in params]
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad


def undo_skipped_counts(optimizer: torch.optim.Optimizer) -> None:
    """Remove a skipped step from a `DecidedOptimizer`'s step counts on the host. Waits for the device's decision."""
    if isinstance(optimizer, DecidedOptimizer):
        optimizer.finalize()


def is_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Return True if a rank can update its shards of this group's parameters without the other shards.

    The key `elementwise` of the group decides, else the optimizer's attribute of that name, else `ELEMENTWISE`.
    """
    return group.get("elementwise", getattr(optimizer, "elementwise", type(optimizer) in ELEMENTWISE))


def fill_group(group: dict[str, Any], kept: Sequence[nn.Parameter | None], names: Sequence[str] | None) -> None:
    """Set the parameters of a group to those that this rank updates, in place.

    kept: one entry for each of its parameters, None if not local. names: `param_names` of the full group, if set.
    """
    group["params"] = [param for param in kept if param is not None]
    if names is not None:
        group["param_names"] = [name for name, param in zip(names, kept, strict=True) if param is not None]


def not_of_model(param: nn.Parameter) -> ModelError:
    """Build the error for a trainable optimizer parameter that the module does not have."""
    return ModelError(
        f"optimizer: it holds a parameter of shape {tuple(param.shape)} that the parallelized model does not have, so "
        f"each rank would train its own. Make it a parameter of the model, before parallelize, or build the optimizer "
        f"after parallelize."
    )
