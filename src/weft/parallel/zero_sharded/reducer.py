"""Gradient reduction of zero=3: settings and hooks of fully_shard's units, and sums over replicas and tp."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Axis, Mesh
from weft.parallel.private_torch import drop_unreduced_gradients
from weft.parallel.state.placement import AxisMap
from weft.parallel.state.precision import Precision
from weft.parallel.zero.engine import GradientReducer, Phase
from weft.parallel.zero_sharded.collectives import connect_unit, unit_wires
from weft.parallel.zero_sharded.hooks import Act, Order, ReplicaSum, StagePasses, watch_calls
from weft.parallel.zero_sharded.optimizer_states import ShardErrorFeedback
from weft.parallel.zero_sharded.units import PartialSums, ShardedParameters
from weft.private_torch import foreach_mul_, graph_task


class UnitSettings:
    """Settings of fully_shard's units that change between microbatches: reduction, resharding, gradient divisor."""

    def __init__(self, modules: Sequence[FSDPModule]):
        self._modules = modules
        self._reduces = True
        self._divisor = 1.0
        #: Reduction hooks of units whose gradients fully_shard cannot divide.
        self.undivided: dict[nn.Module, ReplicaSum] = {}

    def reduce_after_backward(self, reduces: bool) -> None:
        """Set whether backward reduces gradients and frees parameters."""
        if reduces != self._reduces:
            for module in self._modules:
                module.set_requires_gradient_sync(reduces, recurse=False)
                module.set_reshard_after_backward(reduces, recurse=False)
            self._reduces = reduces

    def divide_by(self, divisor: float) -> None:
        """Set the divisor of gradients: 1 for sums, or the number of ranks for means."""
        if divisor != self._divisor:
            for module in self._modules:
                if module in self.undivided:
                    self.undivided[module].factor = 1.0 / divisor
                else:
                    module.set_gradient_divide_factor(divisor)
            self._divisor = divisor


class ShardReducer(GradientReducer):
    """Reduces the gradients of one step, unit by unit, during backward."""

    error_feedback: ShardErrorFeedback

    def __init__(self, parameters: ShardedParameters, mesh: Mesh, axes: AxisMap, precision: Precision):
        super().__init__()
        plan = mesh.plan
        self._parameters, self._axes = parameters, axes
        self._partial = PartialSums(axes, precision, mesh.device)
        self.coders = self._partial.coders
        self.error_feedback = ShardErrorFeedback(
            parameters.slices, parameters.shards, parameters.plain, axes, self.coders
        )
        self._settings = UnitSettings(parameters.modules)
        self._defers = (plan.reshard == "after_step" and plan.microbatches_per_step > 1) or plan.pp > 1
        # If fully_shard accumulates in another dtype, each unit needs a buffer that its first gather creates.
        self._lacks_buffers = self._defers and precision.is_mixed
        kinds = parameters.kinds
        self._late = [(kinds[n].extra, shard) for n, shard in parameters.shards.items() if kinds[n].extra.size > 1]
        self._sums: list[ReplicaSum] = []
        names = [*map(str, parameters.units), *parameters.plain]
        plain, replicas = axes.plain.shard, axes.plain.replicate
        orders = {axis.ranks: Order(axis, names) for axis in dict.fromkeys((plain, replicas, *parameters.unit_axes))}
        #: Orders of the ranks' operations on each axis, the shard axis first.
        self.orders = [orders[plain.ranks], *(orders[ranks] for ranks in orders if ranks != plain.ranks)]
        self._connect(mesh, orders, precision.compute if precision.is_mixed and not self._defers else None)
        self._stages = StagePasses(parameters.modules) if plan.pp > 1 else None

    def _connect(self, mesh: Mesh, orders: dict[tuple[int, ...], Order], short: torch.dtype | None) -> None:
        """Configure fully_shard after construction: collectives, sums instead of means, and hooks."""
        parameters, replicas = self._parameters, self._axes.plain.replicate
        for index, module in enumerate(parameters.modules):
            axis = parameters.unit_axes[index]
            over_shard, over_replicas = unit_wires(self.coders, index, mesh.plan)
            connect_unit(module, index, axis, orders[axis.ranks], over_shard, mesh, short)
            if replicas.size > 1 or axis.size == 1:
                params = [shard.param for shard in parameters.members[index]]
                wire = self.error_feedback.sending(index, params, replicas, over_replicas)
                replica_sum = ReplicaSum(index, params, replicas, orders[replicas.ranks], wire)
                self._sums.append(replica_sum)
                module.set_all_reduce_hook(replica_sum)
                if axis.size == 1:
                    self._settings.undivided[module] = replica_sum
        watch_calls(parameters.modules, self._begin_own_pass, recompute=mesh.plan.recompute != "none")
        for index, (name, param) in enumerate(parameters.plain.items(), len(parameters.units)):
            if param.requires_grad:
                over = parameters.kinds[name].over
                param.register_hook(functools.partial(self._average_plain, index, over))

    def begin_step(self) -> None:
        modules = self._parameters.modules
        if self._lacks_buffers:
            for module in modules:
                module.unshard()
                module.reshard()
            self._lacks_buffers = False
        if self._stages is not None:
            self._stages.begin()
        if self.phase.is_unreduced:
            for module in modules:
                drop_unreduced_gradients(module)
        self.phase = Phase.ACCUMULATE
        self._settings.reduce_after_backward(True)
        self._forget_hosted()
        self.clear()

    def clear(self) -> None:
        for _, param in self._parameters.local():
            param.grad = None
        for shard in self._parameters.shards.values():
            shard.param.grad = None
        for replica_sum in self._sums:
            replica_sum.clear()
        self.coders.discard()

    def _begin_pass(self, last: bool) -> None:
        self._settings.divide_by(1.0)
        self._settings.reduce_after_backward((last or not self._defers) and self._stages is None)
        self._set_last(last, overlaps=last)

    def _end_pass(self, last: bool, completed: bool) -> None:
        try:
            if completed and self._stages is not None:
                self._settings.reduce_after_backward(True)
                self._stages.end()
        finally:
            # Outside microbatches each backward is complete, as a custom training loop expects.
            self._set_last(True, overlaps=False)

    def _set_last(self, last: bool, *, overlaps: bool) -> None:
        """Set whether this is the step's last microbatch, and whether communication may overlap with computation."""
        for replica_sum in self._sums:
            replica_sum.last, replica_sum.may_overlap = last, overlaps
        if self._parameters.hosted is not None:
            self._parameters.hosted.is_last = overlaps

    def finish(self, totals: torch.Tensor | None) -> None:
        """Wait for all sums, and sum `totals` and the gradients of unsharded parameters.

        Raises CommError if another rank starts a different operation.
        """
        self._complete()
        plain, kinds = self._parameters.plain, self._parameters.kinds
        self._partial.add((kinds[name].over, p.grad) for name, p in plain.items() if p.grad is not None)
        self.error_feedback.add()
        if totals is not None:
            all_reduce(totals, self._axes.world)
        self.phase = Phase.READY

    def finish_own(self) -> None:
        """Complete the mean gradients of a custom training loop, when its optimizer steps."""
        self._forget_hosted()
        self._complete()
        self.phase = Phase.OWN_UPDATE

    def _complete(self) -> None:
        """Wait for sums over replicas, set missing gradients to zero, and reduce partial sums once per step."""
        for replica_sum in self._sums:
            replica_sum.wait()
        for order in self.orders:
            order.check(Act.END)
        shards = self._parameters.shards
        for shard in shards.values():
            if shard.param.requires_grad:
                shard.link()
        for param in self._parameters.plain.values():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        if self.phase.is_unreduced:
            self._partial.add((axis, grad) for axis, one in self._late if (grad := one.local.grad) is not None)
            self._partial.level(shards)

    def _forget_hosted(self) -> None:
        if self._parameters.hosted is not None:
            self._parameters.hosted.forget()

    def norm(self) -> torch.Tensor:
        replicas = self._axes.plain.replicate.size
        counted = ((one.grad, num // replicas) for one, num in self._parameters.counted() if one.grad is not None)
        return all_reduce(self._partial.square(counted), self._axes.replica).sqrt()

    def scale(self, factor: float) -> None:
        grads = [param.grad for _, param in self._parameters.local() if param.grad is not None]
        if factor != 1.0 and grads:
            if self._parameters.hosted is not None:
                self._parameters.hosted.scale(factor)  # first: pending copies must not be scaled twice
            foreach_mul_(grads, factor)

    def _begin_own_pass(self, module: nn.Module, args: Any) -> None:
        """Configure fully_shard for a forward outside train steps, in a custom training loop."""
        if not self.phase.in_pass and torch.is_grad_enabled() and graph_task() == -1:
            self.phase = Phase.OWN_BACKWARD
            self._settings.reduce_after_backward(True)
            self._settings.divide_by(float(self._axes.batch.size))

    def _average_plain(self, index: int, over: Axis, grad: torch.Tensor) -> torch.Tensor | None:
        """Return the average of an unsharded gradient over ranks, before autograd adds it to `.grad`.

        Only in a custom training loop; None in a pass of `TrainStep`, which leaves it unchanged.
        """
        if self.phase.in_pass:
            return None
        self.orders[0].check(Act.SUM, index, grad.numel())
        return all_reduce(grad.detach().clone(), over, wire=self.coders[f"plain {index}"]) / self._axes.batch.size
