"""Optimizers that a user's own loop steps: found at their first step, and watched from there.

Whether TrainStep drives is asked of the engine. Where it does not, the optimizer's own step does what TrainStep would
do around it: complete the gradients before, bring the new weights to all ranks after.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.errors import ModelError
from weft.parallel.private_torch import optimizer_step_hooks


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

    def settle(self) -> None:
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
            found.settle()
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
