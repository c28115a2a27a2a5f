"""Base of the ZeRO engines: phases of a step, gradient reduction, and adoption of optimizers.

Two drivers move an engine through its phases. `TrainStep` calls the methods in the order that
`weft.parallel.state.gradients` shows. In a user's own loop, hooks of backward and of the optimizer's step call them.
Both drivers use the same `GradientReducer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum, auto

import torch
from torch import nn

from weft.comm.mesh import Mesh
from weft.comm.wire.coder import Coders
from weft.memory.offload import step_on_host
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.materialize import Materialise, check_same_model, guard_optimizer
from weft.parallel.state.placement import AxisMap, Placement
from weft.parallel.state.precision import Precision
from weft.parallel.zero.adopt import refuse_closures
from weft.parallel.zero.states import across_stages


class Phase(IntEnum):
    """Phase of a module's gradients. TrainStep drives from ACCUMULATE on."""

    IDLE = auto()
    #: Forward and backward of a user's own loop: gradients become means over the ranks.
    OWN_BACKWARD = auto()
    #: The user's optimizer steps.
    OWN_UPDATE = auto()
    #: Between `begin_step` and the last microbatch, outside of microbatches. A step that failed stays here.
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
        """True while TrainStep drives: from `begin_step` to `publish`."""
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
        """True from an optimizer's step until its weights are published."""
        return self is Phase.UPDATE or self is Phase.OWN_UPDATE


class GradientReducer(ABC):
    """Reduces the gradients of one module over the ranks, and holds the phase of its step."""

    coders: Coders

    def __init__(self) -> None:
        self.phase = Phase.IDLE

    @abstractmethod
    def begin_step(self) -> None:
        """Drop all gradients, also of a step that failed."""

    @contextmanager
    def microbatch(self, last: bool) -> Iterator[None]:
        """Surround forward and backward of one microbatch."""
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
        """Wait for the sums of all gradients over the ranks, and sum `totals`."""

    @abstractmethod
    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the full gradient, 0-d float64, equal on all ranks."""

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply all gradients by a factor."""


class ZeroEngine(ABC):
    """Methods that both ZeRO engines share. `weft.parallel.state.gradients.DataParallel` documents them.

    A subclass sets `reducer`, and `updates_on_host` to True if optimizers step parameters in host memory.
    placements: placements of parameters that techniques changed, by name.
    """

    reducer: GradientReducer
    updates_on_host = False

    def __init__(self, mesh: Mesh, placements: Mapping[str, Placement] | None, *, sharded: bool):
        self.device = mesh.device
        self.precision = Precision.of(mesh.plan)
        self.axes = AxisMap(mesh, placements or {}, sharded=sharded)

    def _materialise(self, model: nn.Module, seed: int | None, filled_later: bool) -> Materialise:
        """Check the model on all ranks, and return the values of its parameters on the meta device."""
        self.axes.check_names(model)
        materialise = Materialise(model, self.axes, seed, self.device, filled_later)
        check_same_model(model, self.axes, self.device)
        return materialise

    @property
    def coders(self) -> Coders:
        """Coders of communicated gradients."""
        return self.reducer.coders

    @property
    def in_step(self) -> bool:
        """True while TrainStep drives."""
        return self.reducer.phase.in_step

    def leave_step(self) -> None:
        """End a step of either driver. Gradients of a user's unfinished backward stay incomplete."""
        if self.reducer.phase is not Phase.OWN_BACKWARD:
            self.reducer.phase = Phase.IDLE

    def _begin_update(self) -> None:
        self.reducer.phase = Phase.UPDATE

    def norm(self) -> torch.Tensor:
        """Return the Euclidean norm of the full gradient, after `finish`."""
        return self.reducer.norm()

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters in `optimizer.param_groups` by this rank's shards."""
        if self.has_adopted(optimizer):
            return
        refuse_closures(optimizer)
        self._put_shards(optimizer)
        if self.updates_on_host:
            step_on_host(optimizer)
        self._watch(optimizer)
        guard_optimizer(optimizer, self.axes)

    @abstractmethod
    def has_adopted(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if `adopt` was called with it."""

    @abstractmethod
    def _put_shards(self, optimizer: torch.optim.Optimizer) -> None: ...

    @abstractmethod
    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Register the hooks around the optimizer's step."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full, unrounded trainable parameters by name. A collective."""
        return self._joined(self._full_weights())

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield in full the frozen tensors that are not full on every rank. A collective."""
        return self._joined(self._full_frozen())

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full gradients by name, after `finish` or `publish`. A collective."""
        return self._joined(self._full_gradients())

    def _joined(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors joined over tp and ep, of all pipeline stages."""
        return across_stages(self.axes.named(tensors), self.axes.stages, self.device)

    @abstractmethod
    def _full_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def _full_frozen(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def _full_gradients(self) -> Iterable[tuple[str, torch.Tensor]]: ...

    @abstractmethod
    def model_slices(self) -> Iterator[FlatSlice]:
        """Yield this rank's flat slices of the model. No collective."""

    @torch.no_grad()
    def load_weights(self, source: StateSource) -> None:
        """Fill this rank's flat slices."""
        for one in self.model_slices():
            one.fill(source)
