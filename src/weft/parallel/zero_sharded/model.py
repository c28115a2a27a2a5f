"""zero=3: parameters, gradients and optimizer states sharded, on PyTorch's fully_shard (FSDP2).

Weft adds units (`units.py`), collectives (`collectives.py`), gradients that are sums, also over replicas (`hooks.py`),
and full tensors by name (`shards.py`).

`reshard` determines when gathered parameters are freed. In a step of A microbatches:

        reshard         parameters gathered   gradients reduced   unsharded on each rank
    after_forward   2 A times             A times             the active units
    after_backward  A times               A times             all parameters, from forward to backward
    after_step      once                  once                all parameters; with A > 1 all gradients too

Under a pipeline all microbatches of a step count as one (A = 1), and after_forward is not supported.

Method: Rajbhandari et al. 2020, arXiv 1910.02054 (stage 3); Zhao et al. 2023, arXiv 2304.11277.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from weft.comm.mesh import Mesh
from weft.memory.offload import Host
from weft.optim.step_decision import StepDecision, clip_factor
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import join_sharded
from weft.parallel.state.placement import Placement
from weft.parallel.zero.engine import ZeroEngine, find_optimizers, leaves_steps_out, undo_skipped_counts, watch_steps
from weft.parallel.zero.states import broadcast_buffers
from weft.parallel.zero_sharded.hooks import FirstGathers, ForwardLimits
from weft.parallel.zero_sharded.optimizer_states import plain_states
from weft.parallel.zero_sharded.reducer import ShardReducer
from weft.parallel.zero_sharded.units import ShardedParameters, check_torch


class FullyShardedModel(ZeroEngine):
    """The engine of zero=3 for one module, sharded in place. `gradients.DataParallel` documents its methods.

    model, mesh, placements, seed, filled_later, host: as in `build_engine`, with the same errors.
    """

    reducer: ShardReducer

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
        super().__init__(mesh, placements, sharded=True)
        materialise = self._materialise(model, seed, filled_later)
        parameters = ShardedParameters(model, mesh, self.axes, self.precision, materialise, host)
        self.parameters, shares = (
            parameters,
            (mesh.plan.offload_share("params"), mesh.stage_plan.offload_share("optimizer")),
        )
        self.updates_on_host = host is not None and sum(shares) > 0
        self._moving = [
            (one, self.axes.settling(name, one)) for name, one in parameters.buffers.items() if one.is_floating_point()
        ]
        self._adoption = parameters.adoption
        self.reducer = ShardReducer(parameters, mesh, self.axes, self.precision)
        units = [(str(unit), unit.module) for unit in parameters.units if isinstance(unit.module, FSDPModule)]
        self._limits = ForwardLimits(units, self.reducer.orders, is_stage=mesh.plan.pp > 1)
        self._first_gathers = FirstGathers(parameters.modules, parameters.members, self.reducer.orders[0], self.device)
        find_optimizers(weakref.ref(self))

    def begin_step(self) -> None:
        self._limits.begin_steps()
        self._first_gathers.hand_over()
        self.reducer.begin_step()

    def microbatch(self, last: bool) -> AbstractContextManager[None]:
        return self.reducer.microbatch(last)

    def finish(self, totals: torch.Tensor | None = None) -> None:
        self.reducer.finish(totals)

    def check(self) -> None:
        """Do nothing, because ranks compare their order before each gather or reduction."""

    def scale(self, factor: float) -> None:
        self.reducer.scale(factor)

    def decides_late(self, optimizer: torch.optim.Optimizer) -> bool:
        return not self.updates_on_host and not self.coders.needs_host and leaves_steps_out(optimizer)

    def update(self, optimizer: torch.optim.Optimizer, factor: float | StepDecision) -> None:
        if isinstance(factor, StepDecision):
            self.coders.taken = factor.is_taken
            self._begin_update()
            self._first_gathers.step(optimizer, factor)
        else:
            self.scale(factor)
            self._begin_update()
            optimizer.step()

    def finalize(self) -> None:
        self.precision.refuse_error_feedback()
        self.precision.refuse_unscaled("the optimizer stepped")
        self.reducer.finish_own()

    @torch.no_grad()
    def clip_own(self, max_norm: float) -> torch.Tensor:
        self.finalize()
        self.scale(clip_factor(float(norm := self.norm()), max_norm))
        return norm

    def prefetch_weights(self) -> None:
        self._first_gathers.switch_on()

    def wait_for_weights(self) -> None:
        self._first_gathers.drop()

    def publish(self, clip: float = 1.0, follow: bool = False) -> None:
        broadcast_buffers(self._moving)
        self.coders.commit(clip)
        self.leave_step()

    def has_adopted(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._adoption

    def owns_some(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(self._adoption.name_of(p) is not None for group in optimizer.param_groups for p in group["params"])

    def _put_shards(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's parameters with this rank's shards, or with the full parameters that it updates."""
        self._adoption.put(optimizer)
        join_sharded(optimizer, self._adoption.full_parameters(optimizer), self.axes, self.device)

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters.slices.register_locations(optimizer, self._adoption, self.parameters.plain)
        around = {"before": self._adoption.before_step, "after": self._adoption.after_step}
        watch_steps(optimizer, weakref.ref(self), clear=lambda engine: engine.reducer.clear(), **around)

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.parameters.full(lambda param: param.detach() if param.requires_grad else None)

    def _full_frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield frozen parameters, which zero=3 shards too, and buffers, in full."""
        found = self.parameters.full(lambda param: None if param.requires_grad else param.detach())
        return chain(found, self.axes.rest(self.parameters.buffers.items()))

    def _full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.parameters.full(lambda param: param.grad)

    def local_weights(self) -> dict[str, torch.Tensor]:
        self._free_gathered()
        return {name: param.detach() for name, param in self.parameters.local() if param.requires_grad}

    def counted_weights(self) -> Iterator[tuple[torch.Tensor, int]]:
        return ((one.detach(), number) for one, number in self.parameters.counted() if one.requires_grad)

    def local_gradients(self) -> list[torch.Tensor]:
        return [shard.local.grad for shard in self.parameters.shards.values() if shard.local.grad is not None]

    def model_slices(self) -> Iterator[FlatSlice]:
        self._free_gathered()
        yield from self.parameters.model_slices()

    def _free_gathered(self) -> None:
        """Free gathered parameters, which would become outdated when the shards change."""
        self._first_gathers.drop()
        for module in self.parameters.modules:
            module.reshard()

    def state_slices(self, optimizer: torch.optim.Optimizer) -> Iterator[FlatSlice]:
        self.adopt(optimizer)
        undo_skipped_counts(optimizer)
        yield from self.parameters.slices.states(optimizer, self._adoption)
        yield from plain_states(self.parameters.plain, optimizer, self.axes)

    def load_states(self, optimizer: torch.optim.Optimizer, source: StateSource) -> None:
        self.adopt(optimizer)
        undo_skipped_counts(optimizer)
        self.parameters.slices.take_states(optimizer, self._adoption, self.parameters.plain, source)
