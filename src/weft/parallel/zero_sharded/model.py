"""zero=3: parameters, gradients and optimizer states sharded, on PyTorch's fully_shard (FSDP2).

Weft adds units (`units.py`), collectives (`collectives.py`), gradients that are sums, also over replicas (`hooks.py`),
and full tensors by name (`shards.py`).

`reshard` chooses when gathered parameters are freed. In a step of A microbatches:

    reshard         parameters gathered   gradients reduced   unsharded on each rank meanwhile
    after_forward   2 A times             A times             the active units
    after_backward  A times               A times             all parameters, from forward to backward
    after_step      once                  once                all parameters; with A > 1 all gradients too

Under a pipeline a step is one pass: after_backward and after_step are the same there, and after_forward is refused.

Method: Rajbhandari et al. 2020, arXiv 1910.02054 (stage 3); Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.collectives import all_reduce
from weft.comm.mesh import Axis, Mesh
from weft.memory.offload import Host, step_on_host
from weft.models.inspect.blocks import repeated_blocks
from weft.optim.build import clip_factor
from weft.optim.step_decision import StepDecision
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import join_sharded
from weft.parallel.state.materialize import Materialise, check_same_model, guard_optimizer
from weft.parallel.state.placement import AxisMap, Placement
from weft.parallel.state.precision import Precision, cast_inputs, formats
from weft.parallel.zero.adopt import (
    find_optimizers,
    leaves_steps_out,
    refuse_closures,
    undo_skipped_counts,
    watch_steps,
)
from weft.parallel.zero.states import across_stages, broadcast_buffers
from weft.parallel.zero_sharded.collectives import connect_unit, unit_wires
from weft.parallel.zero_sharded.forward_limits import ForwardLimits
from weft.parallel.zero_sharded.hooks import (
    Act,
    Calls,
    FirstGathers,
    Order,
    ReplicaSum,
    StagePasses,
    drop_partial_gradients,
    hide_hooks,
)
from weft.parallel.zero_sharded.optimizer_states import ShardAdoption, ShardErrorFeedback, ShardSlices, plain_states
from weft.parallel.zero_sharded.shards import HostedShards, choose_hosted, find_shards, full_tensors
from weft.parallel.zero_sharded.units import (
    PartialSums,
    Unit,
    check_torch,
    finalize,
    find_units,
    kinds_of,
    shard_units,
    with_experts,
)
from weft.private_torch import foreach_mul_, graph_task, uncompiled


class FullyShardedModel:
    """The engine of zero=3 for one module, sharded in place. Its methods are documented in `gradients.DataParallel`.

    Args:
        model, mesh, placements, seed, filled_later, host: as in `build_engine`, with the same errors.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        placements: Mapping[str, Placement] | None = None,
        seed: int | None = None,
        filled_later: bool = False,
        *,
        host: Host | None = None,
    ):
        check_torch(mesh)
        axes = self.axes = AxisMap(mesh, placements or {}, sharded=True)
        axes.check_names(model)
        materialise = Materialise(model, axes, seed, mesh.device, filled_later)
        check_same_model(model, axes, mesh.device)
        plan, self.precision, self._device = mesh.plan, Precision.of(mesh.plan), mesh.device
        self._data, self._axis, self._replicas = axes.batch, axes.plain.shard, axes.plain.replicate
        self._defers = (plan.reshard == "after_step" and plan.microbatches_per_step > 1) or plan.pp > 1
        self._has_host = host is not None and plan.offload_share("params") + plan.offload_share("optimizer") > 0
        self.in_step = False  # TrainStep drives, and gradients are sums
        self._in_microbatch = self._averages = self._unfinished = self._is_partial = False
        self._synchronises = True
        self.units = with_experts((*find_units(model), Unit("", model)), model, axes)
        self._unit_axes = [kind.shard for kind in kinds_of(self.units, axes)]
        cast_inputs(model, self.precision)
        chosen = formats(model, self.precision)
        self._buffers = finalize(model, chosen, self.precision, axes)
        self._moving = [(one, axes.settling(n, one)) for n, one in self._buffers.items() if one.is_floating_point()]
        originals = dict(model.named_parameters())
        kinds = self._kinds = {name: axes.of(name, param.shape) for name, param in originals.items()}
        self._partial = PartialSums(axes, self.precision, mesh.device)
        self.coders = self._partial.coders
        self.plain = {n: p for n, p in originals.items() if p.ndim == 0 or chosen[p] != self.precision.compute}
        materialise.make(self.plain.values())
        plain = set(self.plain.values())
        members, on_host = shard_units(self.units, self._unit_axes, mesh, self.precision, plain, materialise)
        self.shards = find_shards(model, list(originals), lambda name: kinds[name].shard)
        self._late = [(kinds[n].extra, shard) for n, shard in self.shards.items() if kinds[n].extra.size > 1]
        names = choose_hosted(self.shards, on_host, plan)
        self._hosted = HostedShards(host, self.shards, names) if host is not None and names else None
        if self._hosted is not None and self._replicas.size == 1:
            self._hosted.watch(n for n in names if kinds[n].extra.size == 1 and kinds[n].shard.size > 1)
        self._adoption = ShardAdoption(self.shards, originals, self._axis, self._hosted)
        self._placed = ShardSlices(self.shards, kinds, axes)
        self.error_feedback = ShardErrorFeedback(self._placed, self.shards, self.plain, axes, self.coders)
        self._modules = [unit.module for unit in self.units if isinstance(unit.module, FSDPModule)]
        shards = [[self.shards[name] for name in names] for names in members]
        self._connect(mesh, [[shard.param for shard in own] for own in shards])
        self._first_gathers = FirstGathers(self._modules, shards, self._orders[0], self._device)
        # If fully_shard accumulates in another dtype, it needs a buffer in each unit that the first gather creates.
        self._places_missing = self._defers and self.precision.is_mixed
        self._stage_passes = StagePasses(self._modules) if plan.pp > 1 else None
        find_optimizers(weakref.ref(self))

    def _connect(self, mesh: Mesh, members: list[list[nn.Parameter]]) -> None:
        """Configure fully_shard after construction: collectives, sums instead of means, hooks."""
        names, calls = [*map(str, self.units), *self.plain], Calls()
        axes = (self._axis, self._replicas, *self._unit_axes)
        orders = {axis.ranks: Order(axis, names) for axis in dict.fromkeys(axes)}
        self._orders = [orders[self._axis.ranks], *(orders[ranks] for ranks in orders if ranks != self._axis.ranks)]
        self._sums, self._undivided = list[ReplicaSum](), dict[nn.Module, ReplicaSum]()
        short = self.precision.compute if self.precision.is_mixed and not self._defers else None
        for index, module in enumerate(self._modules):
            axis = self._unit_axes[index]
            over_shard, over_replicas = unit_wires(self.coders, index, mesh.plan)
            connect_unit(module, index, axis, orders[axis.ranks], over_shard, mesh, short)
            if self._replicas.size > 1 or axis.size == 1:
                over, wire = (
                    self._replicas,
                    self.error_feedback.sending(index, members[index], self._replicas, over_replicas),
                )
                self._sums.append(ReplicaSum(index, members[index], over, orders[over.ranks], wire))
                module.set_all_reduce_hook(self._sums[-1])
                if axis.size == 1:
                    self._undivided[module] = self._sums[-1]
            calls.watch(module, is_root=index == len(self._modules) - 1)
        if mesh.plan.recompute != "none" and not repeated_blocks(self._modules[-1]):
            for module in self._modules[:-1]:
                hide_hooks(module)
        self._modules[-1].register_forward_pre_hook(uncompiled(self._begin_own_pass))
        units = [(str(unit), unit.module) for unit in self.units if isinstance(unit.module, FSDPModule)]
        self._limits = ForwardLimits(units, self._orders)
        for index, (name, param) in enumerate(self.plain.items(), len(self.units)):
            if param.requires_grad:
                param.register_hook(functools.partial(self._average_plain, index, self._kinds[name].over))

    def begin_step(self) -> None:
        """Drop all gradients, including those of a step that failed."""
        self.in_step = True
        self._limits.begin_steps()
        self._first_gathers.hand_over()
        if self._places_missing:
            for module in self._modules:
                module.unshard()
                module.reshard()
            self._places_missing = False
        if self._stage_passes is not None:
            self._stage_passes.begin()
        if self._unfinished:
            drop_partial_gradients(self._modules)
            self._unfinished = False
        self._synchronise(True)
        if self._hosted is not None:
            self._hosted.forget()
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        for param in chain(self._optimized(), (shard.param for shard in self.shards.values())):
            param.grad = None
        for replica_sum in self._sums:
            replica_sum.clear()
        self.coders.discard()

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Surround forward and backward of one microbatch, or of all microbatches under a pipeline."""
        self._in_microbatch = self._unfinished = self._is_partial = True
        self._average(False)
        self._synchronise((last or not self._defers) and self._stage_passes is None)
        self._at_last(last, overlaps=last)
        try:
            yield
            if self._stage_passes is not None:
                self._synchronise(True)
                self._stage_passes.end()
            self._unfinished = not last
        finally:
            # Outside of microbatches each backward is complete, as a user's own loop expects.
            self._in_microbatch = False
            self._at_last(True, overlaps=False)

    def _at_last(self, last: bool, *, overlaps: bool) -> None:
        """Set if new gradients include earlier passes, and if their communication may overlap."""
        for replica_sum in self._sums:
            replica_sum.last, replica_sum.may_overlap = last, overlaps
        if self._hosted is not None:
            self._hosted.is_last = overlaps

    def finish(self, totals: torch.Tensor | None = None) -> None:
        """Wait for all sums, and sum `totals` and unsharded gradients.

        Raises:
            CommError: if some ranks did not reach this call.
        """
        self._finalize_gradients()
        self._partial.add((self._kinds[name].over, p.grad) for name, p in self.plain.items() if p.grad is not None)
        self.error_feedback.add()
        if totals is not None:
            all_reduce(totals, self.axes.world)

    def _finalize_gradients(self) -> None:
        for replica_sum in self._sums:
            replica_sum.wait()
        for order in self._orders:
            order.meet(Act.END)
        for shard in self.shards.values():
            if shard.param.requires_grad:
                shard.link()
        for param in self.plain.values():
            if param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        if self._is_partial:
            self._partial.add((axis, grad) for axis, one in self._late if (grad := one.local.grad) is not None)
            self._partial.level(self.shards)
            self._is_partial = False

    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the full gradient: 0-d float64, equal on all ranks."""
        grads = ((one.grad, num // self._replicas.size) for one, num in self._numbered() if one.grad is not None)
        return all_reduce(self._partial.square(grads), self.axes.replica).sqrt()

    def _numbered(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield this rank's shards and unsharded parameters, each with the number of ranks that store the same."""
        yield from ((shard.local, self._kinds[name].share[1]) for name, shard in self.shards.items())
        yield from ((param, self._kinds[name].same.size) for name, param in self.plain.items())

    def check(self) -> None:
        """Do nothing: ranks compare their order before each gather or reduction."""

    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        grads = [param.grad for param in self._optimized() if param.grad is not None]
        if factor != 1.0 and grads:
            if self._hosted is not None:
                self._hosted.scale(factor)  # first: pending copies must not be scaled twice
            foreach_mul_(grads, factor)

    def decides_late(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `update` accepts the device's decision for this optimizer."""
        return not self._has_host and not self.coders.needs_host and leaves_steps_out(optimizer)

    def update(self, optimizer: torch.optim.Optimizer, factor: float | StepDecision) -> None:
        """Run the optimizer's step with gradients multiplied by a factor."""
        if isinstance(factor, StepDecision):
            self.coders.taken = factor.is_taken
            self._first_gathers.step(optimizer, factor)
        else:
            self.scale(factor)
            optimizer.step()

    @torch.no_grad()
    def clip_own(self, max_norm: float) -> torch.Tensor:
        """Clip the gradients in a user's own loop. Return the norm of the full gradient before clipping."""
        self.finalize()
        self.scale(clip_factor(float(norm := self.norm()), max_norm))
        return norm

    def prefetch_weights(self) -> None:
        """Gather the first units of forward during the optimizer step. Other units are gathered at their calls."""
        self._first_gathers.switch_on()

    def arrive(self) -> None:
        """Drop prefetched weights, because the caller may change the shards."""
        self._first_gathers.drop()

    def publish(self, clip: float = 1.0, follow: bool = False) -> None:
        """Make the next forward gather the updated shards. Buffers are broadcast from the first rank."""
        broadcast_buffers(self._moving)
        self.coders.commit(clip)
        self.in_step = False

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's parameters by this rank's shards, or by the full parameters that it updates."""
        if self.has_adopted(optimizer):
            return
        refuse_closures(optimizer)
        self._adoption.put(optimizer)
        join_sharded(optimizer, self._adoption.whole(optimizer), self.axes, self._device)
        if self._has_host:
            step_on_host(optimizer)
        self._placed.tell(optimizer, self._adoption, self.plain)
        around = {"before": self._adoption.before_step, "after": self._adoption.after_step}
        watch_steps(optimizer, weakref.ref(self), clear=FullyShardedModel.clear, **around)
        guard_optimizer(optimizer, self.axes)

    def has_adopted(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer was adopted."""
        return optimizer in self._adoption

    def owns_some(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the optimizer holds parameters of this module."""
        return any(self._adoption.name_of(p) is not None for group in optimizer.param_groups for p in group["params"])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full trainable parameters by name. A collective."""
        return self._whole(lambda param: param.detach() if param.requires_grad else None)

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full frozen parameters by name: zero=3 shards them too. A collective."""
        rest = self.axes.named(self.axes.rest(self._buffers.items()))
        found = full_tensors(self.shards, self.plain, lambda one: None if one.requires_grad else one.detach())
        return across_stages(chain(self.axes.named(found), rest), self.axes.stages, self._device)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full gradients by name. A collective."""
        return self._whole(lambda param: param.grad)

    def local_weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's shards and unsharded parameters by name."""
        self._first_gathers.drop()
        for module in self._modules:
            module.reshard()  # gathered copies would become outdated
        params = {name: shard.local for name, shard in self.shards.items()} | self.plain
        return {name: param.detach() for name, param in params.items() if param.requires_grad}

    def counted_weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield this rank's part of the trainable parameters, with the number of ranks that store the same part."""
        return ((one.detach(), number) for one, number in self._numbered() if one.requires_grad)

    def local_gradients(self) -> list[torch.Tensor]:
        """Return the gradients of this rank's shards."""
        return [shard.local.grad for shard in self.shards.values() if shard.local.grad is not None]

    def stretches(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the model. No collective."""
        self.local_weights()  # frees gathered parameters
        yield from (one for name in self.shards if (one := self._placed.of(name)) is not None)
        for name, tensor in (*self.plain.items(), *self._buffers.items()):
            yield self.axes.stretch(name, tensor)

    def state_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the optimizer's state. No collective."""
        self.adopt(optimizer)
        undo_skipped_counts(optimizer)
        yield from self._placed.states(optimizer, self._adoption)
        yield from plain_states(self.plain, optimizer, self.axes)

    @torch.no_grad()
    def load_weights(self, source: StateSource) -> None:
        """Fill this rank's flat slices."""
        for one in self.stretches():
            one.fill(source)

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        """Load this rank's part of the optimizer states that any plan saved."""
        self.adopt(optimizer)
        undo_skipped_counts(optimizer)
        self._placed.take_states(optimizer, self._adoption, self.plain, source)

    def finalize(self) -> None:
        """Set gradients where the optimizer reads them, at the step of a user's own loop."""
        self.precision.refuse_error_feedback()
        self.precision.refuse_unscaled("the optimizer stepped")
        if self._hosted is not None:
            self._hosted.forget()
        self._finalize_gradients()

    def _optimized(self) -> Iterator[nn.Parameter]:
        return chain((shard.local for shard in self.shards.values()), self.plain.values())

    def _whole(self, of: Callable[[nn.Parameter], torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
        found = full_tensors(self.shards, self.plain, of)
        return across_stages(self.axes.named(found), self.axes.stages, self._device)

    def _synchronise(self, wanted: bool) -> None:
        """Set if backward reduces gradients and frees parameters."""
        if wanted != self._synchronises:
            for module in self._modules:
                module.set_requires_gradient_sync(wanted, recurse=False)
                module.set_reshard_after_backward(wanted, recurse=False)
            self._synchronises = wanted

    def _average(self, wanted: bool) -> None:
        """Set if gradients are means over the ranks, as in a user's own loop, or sums."""
        if wanted != self._averages:
            number = float(self._data.size) if wanted else 1.0
            for module in self._modules:
                if module in self._undivided:
                    self._undivided[module].factor = 1.0 / number
                else:
                    module.set_gradient_divide_factor(number)
            self._averages = wanted

    def _begin_own_pass(self, module: nn.Module, args: Any) -> None:
        """Configure a forward outside of train steps for a user's own loop."""
        if not self._in_microbatch and torch.is_grad_enabled() and graph_task() == -1:
            self.in_step, self._is_partial = False, True
            self._synchronise(True)
            self._average(True)

    def _average_plain(self, index: int, over: Axis, grad: torch.Tensor) -> torch.Tensor | None:
        """Average an unsharded gradient in a user's own loop, before autograd adds it to `.grad`."""
        if self._in_microbatch:
            return None
        self._orders[0].meet(Act.SUM, index, grad.numel())
        return all_reduce(grad.detach().clone(), over, wire=self.coders[f"plain {index}"]) / self._data.size
