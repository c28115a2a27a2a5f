"""What Weft adds to fully_shard's own hooks: sums over replicas, calls of units, and the passes of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.comm import Pending, start_all_reduce
from weft.comm.wire import Coder
from weft.mesh import Axis
from weft.parallel.private_torch import (
    base_of_its_own,
    drop_unreduced_gradients,
    end_backward,
    forget_forward,
    fsdp_state,
    wrap_forward_hooks,
)
from weft.parallel.zero.sharded.gather_order import Act, Order
from weft.private_torch import graph_task, tree_map, uncompiled, without_modes


class ReplicaSum:
    """The second half of HSDP's reduction for one unit: shards of gradients summed over the replicas.

    Called by fully_shard with the flat sum over the shard axis, before it becomes the gradients of `params` (views, or
    an addition where they have gradients). Over the replicas only the last microbatch's call communicates.
    wire: what travels in place of so many of them.
    """

    def __init__(
        self, unit: int, params: Sequence[nn.Parameter], axis: Axis, order: Order, wire: Callable[[int], Coder]
    ):
        self._unit = unit
        self._params = params
        self._axis = axis
        self._order = order
        self._wire = wire
        self._kept: torch.Tensor | None = None
        self._pending: Pending | None = None
        #: False in the passes of a step before the last one.
        self.last = True
        #: True where nobody touches gradients before `wait`.
        self.may_overlap = False
        #: What a unit that nobody divides multiplies its gradients by: fully_shard would divide them twice.
        self.factor = 1.0

    def __call__(self, sums: torch.Tensor) -> None:
        """Add this call's share; in place."""
        if self.factor != 1.0:
            sums *= self.factor
        if not self.last:
            if self._kept is None:
                self._kept = sums  # fully_shard makes views of it the gradients and adds later sums to them
            return
        if self._kept is not None:
            sums += self._kept
            if sums.is_cuda:
                # It comes from the stream of reduce_scatter, whose next result must not lie there before this is added.
                self._kept.record_stream(torch.cuda.current_stream(sums.device))
            for param in self._params:
                param.grad = None
            self._kept = None
        self._order.meet(Act.SUM, self._unit, sums.numel())
        # A unit that is reduced twice in a step is added to at once, so the first sum must be complete then.
        again = self._pending is not None
        self.wait()
        pending = start_all_reduce(sums, self._axis, wire=self._wire(sums.numel()))
        if self.may_overlap and not again:
            self._pending = pending
        else:
            pending.wait()

    def wait(self) -> None:
        """Until the sum is complete."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def clear(self) -> None:
        """Forget what a step left behind."""
        self.wait()
        self._kept = None


class Calls:
    """Counts the calls of each unit in a forward pass.

    A unit that is called once is reduced with zeros for the parameters that this rank did not use, so that ranks may
    use different ones. With several calls fully_shard would reduce once for each, so there it reduces what there is.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def watch(self, module: nn.Module, is_root: bool) -> None:
        """Count the calls of this unit, where torch can reduce zeros (2.13 and later)."""
        set_zeros = getattr(module, "set_reduce_scatter_unused_params", None)
        if set_zeros is None:
            return
        set_zeros(True, recurse=False)

        def count(module: Any, args: Any) -> None:
            if is_root:
                self._counts.clear()
            # Inside a backward pass it is called to recompute, which is no new use.
            if not torch.is_grad_enabled() or graph_task() != -1:
                return
            calls = self._counts[id(module)] = self._counts.get(id(module), 0) + 1
            if calls <= 2:
                set_zeros(calls == 1, recurse=False)

        module.register_forward_pre_hook(uncompiled(count))


def return_no_views(module: nn.Module) -> None:
    """Let a unit return tensors that are no views, before fully_shard hangs its hooks on them.

    A layer with a bias returns one. What works on it in place would take the hook away that gathers the unit for
    backward. What has no gradient stays the same object: a head's loss knows the batch's labels by it.
    """
    module.register_forward_hook(_without_views, prepend=True)


@uncompiled
def _without_views(module: nn.Module, args: Any, output: Any) -> Any:
    del module, args
    return tree_map(
        lambda one: base_of_its_own(one) if isinstance(one, torch.Tensor) and one.requires_grad else one, output
    )


def hide_hooks(module: nn.Module) -> None:
    """Keep what hooks of a unit compute out of a recomputed region around it.

    Such a region counts operations, and gathering takes other ones in the replay, where the unit may be whole already.
    """
    wrap_forward_hooks(module, lambda hook: functools.partial(_outside_of_modes, hook))


@uncompiled
def _outside_of_modes(hook: Any, *args: Any) -> Any:
    with without_modes():
        return hook(*args)


def drop_partial_gradients(modules: Sequence[FSDPModule]) -> None:
    """Forget unreduced gradients of a step that broke off."""
    for module in modules:
        drop_unreduced_gradients(module)


class StagePasses:
    """The passes of one step of a pipeline, of which forward and backward go on side by side.

    fully_shard expects one root forward after another, each with its end and its backward. A stage leaves the root's
    forward in the middle, and the pass is over when the schedule is: so gradients add up unreduced until then. As in
    torch.distributed.pipelining, what fully_shard does at the end of a backward is called by hand.
    """

    def __init__(self, modules: Sequence[FSDPModule]):
        self._modules = modules
        # Now, while all modules are in their places: each stage's forward stands in for those of the others.
        self._root = fsdp_state(modules[-1])

    def begin(self) -> None:
        """Forget a forward that a stage left in the middle."""
        forget_forward(self._root)
        self._modules[-1].set_is_last_backward(False)

    def end(self) -> None:
        """Reduce what all backwards added up, and let the parameters go."""
        self._modules[-1].set_is_last_backward(True)
        end_backward(self._modules[::-1], self._root)
