"""Optimizers that a user's own loop steps: found at their first step, and watched from there.

Whether TrainStep drives is asked of the engine. Where it does not, the optimizer's own step does what TrainStep would
do around it: complete the gradients before, bring the new weights to all ranks after.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.errors import ModelError
from weft.optim.step_decision import DecidedOptimizer, StepDecision
from weft.parallel.private_torch import optimizer_step_hooks
from weft.private_torch import foreach_mul_


class WatchedEngine(Protocol):
    """What the watchers of optimizers ask of an engine. in_step: whether TrainStep drives now."""

    in_step: bool

    def has_adopted(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether `adopt` was called with it."""
        ...

    def owns_some(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer holds parameters of the engine's module."""
        ...

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Put this rank's parts in the place of the module's parameters."""
        ...

    def finalize(self) -> None:
        """At the step of a user's own loop: have all gradients where the optimizer looks for them."""
        ...

    def publish(self) -> None:
        """After the step: the next forward sees the new weights, on all ranks."""
        ...


Engine = TypeVar("Engine", bound=WatchedEngine)


def watch_steps(
    optimizer: torch.optim.Optimizer,
    engine: weakref.ref[Engine],
    *,
    clear: Callable[[Engine], None],
    before: Callable[[torch.optim.Optimizer], None] | None = None,
    after: Callable[[torch.optim.Optimizer], None] | None = None,
) -> None:
    """From here the optimizer's own step does what TrainStep would do around it, where TrainStep does not drive.

    clear: what the engine does besides in `zero_grad`. before, after: what every step does right around the optimizer's
    own, driven or not. ModelError at a step with a closure.
    """

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = engine()
        if found is not None and not found.in_step:
            if any(arg is not None for arg in (*args[1:], kwargs.get("closure"))):
                raise ModelError(
                    f"optimizer {type(optimizer).__name__}: a closure computes gradients inside of step(), where ranks "
                    f"cannot meet. Call backward() first, then step()."
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
    """Adopts, at its first step, an optimizer of the module's parameters that nobody handed over.

    Without it the weights of each rank would go their own way, without a word.
    """

    def __init__(self, engine: Callable[[], WatchedEngine | None]):
        self.engine = engine

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        found = self.engine()
        if found is not None and not found.has_adopted(optimizer) and found.owns_some(optimizer):
            found.adopt(optimizer)


def find_optimizers(engine: Callable[[], WatchedEngine | None]) -> None:
    """Look at each optimizer's first step whether the engine has to adopt it.

    Finders of engines that are gone are taken away here, since hooks must not change while an optimizer steps.
    """
    hooks = optimizer_step_hooks()
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Finder) and hook.engine() is None]:
        del hooks[key]
    register_optimizer_step_pre_hook(_Finder(engine))


# The rules by which both engines take over an optimizer that was built on a module's parameters.

#: Of torch's optimizers, those whose update of an element depends on that element's gradient and state alone.
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

#: Those whose fused kernels leave a step out where the device says so, their counts of steps too.
_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})


def leaves_steps_out(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step_by_decision` can step this optimizer as it is set now."""
    if isinstance(optimizer, DecidedOptimizer):
        return True
    return type(optimizer) in _FUSED and all(group.get("fused") for group in optimizer.param_groups)


def steps_in_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step_by_decision` can step some parameters before the others."""
    return type(optimizer) in _FUSED


@torch.no_grad()
def step_by_decision(
    optimizer: torch.optim.Optimizer,
    decision: StepDecision,
    first: Collection[int] = (),
    between: Callable[[], None] | None = None,
) -> None:
    """Step with gradients multiplied by the decision's factor, unless the device finds that the step is not taken.

    Args:
        optimizer: that `leaves_steps_out`.
        decision: of the device.
        first: ids of parameters that are stepped before the others, where it `steps_in_parts`; empty: all at once.
        between: called when these were stepped.
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
    # As torch's GradScaler tells fused optimizers.
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
    """Let the optimizer leave these parameters out."""
    grads = [(param, param.grad) for param in params]
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad


def undo_skipped_counts(optimizer: torch.optim.Optimizer) -> None:
    """Take a step that the device did not take out of what the host counted. Waits for its decision."""
    if isinstance(optimizer, DecidedOptimizer):
        optimizer.finalize()


def is_elementwise(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether the optimizer needs no more than its own part of a parameter of this group.

    `elementwise` in the group says so, else the attribute of the optimizer, else whether its class is known to be.
    """
    return group.get("elementwise", getattr(optimizer, "elementwise", type(optimizer) in ELEMENTWISE))


def fill_group(group: dict[str, Any], kept: Sequence[nn.Parameter | None], names: Sequence[str] | None) -> None:
    """Put what this rank updates into a group, in place. kept: one for each of its parameters, None where not here.

    names: `param_names` of the whole group, where it has them.
    """
    group["params"] = [param for param in kept if param is not None]
    if names is not None:
        group["param_names"] = [name for name, param in zip(names, kept, strict=True) if param is not None]


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """ModelError for an optimizer that calls the model inside of its step."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ModelError("optimizer LBFGS: it calls the model inside of its step. Use another optimizer.")


def not_of_model(param: nn.Parameter) -> ModelError:
    """The error for a trainable parameter in an optimizer that the module does not have."""
    return ModelError(
        f"optimizer: it holds a parameter of shape {tuple(param.shape)} that the parallelized model does not have, so "
        f"each rank would train its own. Make it a parameter of the model, before parallelize, or build the optimizer "
        f"after parallelize."
    )
