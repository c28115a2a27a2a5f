"""Runtime of a pipeline schedule, with deferred weight gradients.

Linear layers get a subclass whose weight gradient can be deferred (parallel/layers/deferred_gradients.py). Layers that
support this already, such as layers sharded by tensor parallelism, only get the object that stores the factors. Other
layers compute all gradients in backward, which is correct but less balanced.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from weft.comm.mesh import Mesh
from weft.comm.peer import PeerLane, join_lanes
from weft.config.pipeline_schedule import (
    Action,
    Key,
    Transfer,
    arrived_by,
    flows,
    parts,
    receiving_early,
    schedule_of,
    with_transfers,
)
from weft.errors import ModelError
from weft.models.adapters import AdaptedLinear
from weft.models.inspect.blocks import repeated_blocks, replace_class
from weft.parallel.layers.deferred_gradients import DeferredProduct, DeferredWeightGrad, HoldingLayer, linear
from weft.parallel.pipeline.boundary import Boundary, Carried
from weft.parallel.pipeline.stage import ForwardFn, Split, Stage, split_model
from weft.parallel.state.gradients import NotCopied
from weft.parallel.state.placement import Placement


@torch.no_grad()
def deliver(held: list[DeferredProduct]) -> None:
    """Compute deferred weight gradients and pass them to autograd, as if their backward ran now. Empties `held`.

    Weights are processed one after another, and the factors of each are freed, so that a stage never holds all new
    gradients in addition to the accumulated ones. All gradients of one weight are passed in one call, because its
    gradient hooks must run only once.
    """
    by_weight: dict[nn.Parameter, list[DeferredProduct]] = {}
    for product in held:
        by_weight.setdefault(product.weight, []).append(product)
    held.clear()
    for weight in list(by_weight):
        grads = [product.multiply() for product in by_weight.pop(weight)]
        torch.autograd.backward([weight] * len(grads), grads)
        del grads


def defer_weight_gradients(model: nn.Module, held: DeferredWeightGrad) -> int:
    """Make the linear layers of a model defer weight gradients to `held`. Returns the number of these layers.

    Except for `HoldingLayer`s, layers with an adapter or a replaced forward, and subclasses that override forward, are
    not changed.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, HoldingLayer):
            module._weft_held = held
            count += 1
            continue
        kind = _kind_of(module)
        if kind is not None and "forward" not in vars(module):
            replace_class(module, kind, held=held)
            count += 1
    return count


class _HoldingLinear(HoldingLayer):
    """nn.Linear whose weight gradient can be deferred."""

    _weft_held: DeferredWeightGrad

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, self._weft_held)


class _HoldingConv1D(HoldingLayer):
    """transformers' Conv1D of GPT-2: a linear layer whose weight is (I, O)."""

    _weft_held: DeferredWeightGrad

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self._weft_held, transposed=True)


def _kind_of(module: nn.Module) -> type[nn.Module] | None:
    if isinstance(module, AdaptedLinear):
        return None  # its weight is frozen, so nothing can be deferred
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return _HoldingLinear
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx"):
        return _HoldingConv1D
    return None


# Execution of one rank's schedule: forwards, backwards, weight gradients and transfers.

#: (output, batch, microbatch index) -> (sum of losses, number of tokens).
CountedLoss = Callable[[Any, Any, int], tuple[torch.Tensor, torch.Tensor | int]]
#: Microbatch index -> context of its forward.
Inside = Callable[[int], AbstractContextManager[None]]
#: Each stage seeds its generator with the microbatch's seed plus a multiple of this.
_SEED_STRIDE = 0x9E3779B97F4A7C15
_ATTRIBUTE = "_weft_pipeline"


class Phases(Protocol):
    """Timer for the phases of a step."""

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]: ...


@dataclass(slots=True)
class _Flight:
    """A microbatch on a stage, between its forward and its backward.

    `incoming` holds the stage's inputs, which get gradients in backward. `roots` holds the autograd edge at which
    backward starts for each output, or None for an output that needs no gradient.
    """

    incoming: Carried | None
    roots: list[Any]


@dataclass(slots=True)
class StepWork:
    """Inputs of one optimizer step.

    Attributes:
        forward_to_loss: replaces `forward` on the last stage.
        scale: factor of the loss before backward.
        totals: (sum of losses, number of tokens), to which the last stage adds.
        seeds: seed of torch's generator for each microbatch, or None to set none.
        inside: returns the context of a microbatch's forward, for dropout.
    """

    microbatches: Sequence[Any]
    forward: ForwardFn
    forward_to_loss: ForwardFn
    loss: CountedLoss
    scale: float | torch.Tensor
    totals: torch.Tensor
    seeds: Sequence[int] | None = None
    inside: Inside | None = None


class Pipeline:
    """Pipeline stages of one rank, and the rank's list of schedule actions."""

    def __init__(self, split: Split, mesh: Mesh):
        self.stages = split.stages
        self.counts = split.counts
        self.schedule = schedule_of(mesh.plan)
        programs = with_transfers(self.schedule)
        self.program = programs[mesh["pp"].rank]
        self._arrived_by = arrived_by(programs, mesh["pp"].rank)
        self._early = receiving_early(self.program)
        self._axis = mesh["pp"]
        actions = [action for step in self.schedule.ranks[self._axis.rank] for action in parts(step)]
        #: (stage, microbatch) of the backwards whose weight gradients are computed later.
        self._split = {(action.stage, action.microbatch) for action in actions if action.kind == "W"}
        lanes = join_lanes(self._axis, mesh.device, (PeerLane(*flow) for flow in flows(self.schedule, self._axis.rank)))
        self._boundary = Boundary(self._axis, mesh.device, lanes)
        self._held = DeferredWeightGrad()
        self._plan = mesh.plan
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._weights: dict[tuple[int, int], list[Any]] = {}
        #: Tensors that pass between two stages of this rank, or are to be sent.
        self._made: dict[tuple[str, int, int], Carried] = {}
        self._kinds: list[int] = []  # of the microbatches, which have one kind per shapes
        self._computed = 0.0  # time when the inputs of the current action were complete
        #: (action, start, end) of each computation of the last step, in seconds since its begin, by the host's clock.
        self.events: list[tuple[Action, float, float]] = []

    @property
    def runs(self) -> list[tuple[str, ...]]:
        """Paths of the blocks of each stage on this rank."""
        return [stage.blocks for stage in self.stages.values()]

    def defer_weight_gradients(self, model: nn.Module) -> None:
        """Make this rank's linear layers defer the weight gradients that the schedule computes later.

        Modifies the model. A compiled block computes all gradients in backward, so its action for weight gradients (W)
        does nothing.

        Raises ModelError if the plan recomputes or compiles blocks and the model has no blocks.
        """
        plan = self._plan
        if not repeated_blocks(model) and (plan.recompute != "none" or plan.compile):
            field = "compile=on" if plan.recompute == "none" else f"recompute={plan.recompute}"
            raise ModelError(
                f"{field}: under a pipeline it works on repeated blocks, and {type(model).__name__} has none. "
                f"Put its layers into an nn.ModuleList or composite children of nn.Sequential, or leave it out."
            )
        if self._split and not plan.compile:
            defer_weight_gradients(model, self._held)

    def step(self, work: StepWork, phases: Phases) -> None:
        """Run forward and backward of all microbatches. Collective over the pp axis.

        Gradients are accumulated, and the last stage adds to `work.totals`.
        """
        self._begin(work.microbatches, self._arrived_by)
        self._survey(work.forward, work.microbatches)
        began = self._computed = time.perf_counter()
        self.events = []
        # A receive of unrecorded shape blocks the host, so it must run in the order that all ranks share.
        for step in self._early if self._boundary.knows(self._kinds) else self.program:
            if isinstance(step, Transfer):
                with phases.phase("wait"):
                    self._move(step)
                continue
            self._computed = time.perf_counter()
            self._act(step, work, phases)
            self.events.append((step, self._computed - began, time.perf_counter() - began))
        with phases.phase("wait"):
            self._boundary.end(self._kinds)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Any], forward: ForwardFn, each: Callable[[Any, Any], None]) -> None:
        """Run only the forward of batches, one after another.

        Collective over the pp axis.

        Args:
            batches: the same batches on all ranks of the axis.
            forward: forward(model, batch) -> output.
            each: each(output, batch), called on the rank with the last stage.
        """
        self._begin([])
        for batch in batches:
            self._kinds = [self._boundary.kind_of(batch)]
            self._survey(forward, [batch])
            for index, stage in self.stages.items():
                if index and (source := self.schedule.owner(index - 1)) != self._axis.rank:
                    self._move(Transfer("receive", "activation", index, 0, source))
                output = stage.forward(forward, batch, self._incoming(index, 0))
                if stage.is_last:
                    each(output, batch)
                    continue
                self._made["activation", index + 1, 0] = output
                if (target := self.schedule.owner(index + 1)) != self._axis.rank:
                    self._move(Transfer("send", "activation", index + 1, 0, target))
        self._boundary.end()

    @property
    def has_last(self) -> bool:
        """True if this rank has the last stage."""
        return any(stage.is_last for stage in self.stages.values())

    @contextlib.contextmanager
    def probing(self, batch: Any, forward: ForwardFn) -> Iterator[None]:
        """Restore the recorded shapes of module outputs after the context.

        Within it, `run_in_turn` may run batches of other sizes. forward: forward(model, batch) -> output. Raises
        ModelError if the pipeline does not support the model's forward.
        """
        self._survey(forward, [batch])
        survey = next(iter(self.stages.values())).known_shapes
        with survey.restored():
            yield

    def run_in_turn(
        self, batch: Any, forward: ForwardFn, forward_to_loss: ForwardFn, agree: Callable[[Exception | None], None]
    ) -> list[Any]:
        """Run the forward of one batch, stage after stage, and return the results of this rank's stages.

        Collective over the pp axis and the ranks of `agree`. Unlike in `evaluate`, no rank waits for a failed stage.

        Args:
            batch: the same batch on all ranks of the axis.
            forward: forward(model, batch) -> output.
            forward_to_loss: `forward` of the last stage.
            agree: called by all ranks after each stage with their error or None; it raises on all ranks or on none.
        """
        self._begin([])
        made, incoming, error = list[Any](), None, None
        for index in range(len(self.counts)):
            stage, following = self.stages.get(index), index + 1
            if stage is not None:
                try:
                    if incoming is not None and torch.is_grad_enabled():
                        for tensor in incoming.tensors:
                            tensor.requires_grad_(tensor.is_floating_point())
                    made.append(stage.forward(forward_to_loss if stage.is_last else forward, batch, incoming))
                    if not stage.is_last:
                        self._boundary.check(following, made[-1])
                except Exception as caught:  # the model's own code; `agree` raises it
                    error = caught
            agree(error)
            if following < len(self.counts):
                output = made[-1].detach() if stage is not None else None
                incoming = self._pass_on(index, output)
        self._boundary.end()
        return made

    def _pass_on(self, index: int, output: Carried | None) -> Carried | None:
        """Pass the output of stage `index` to the next stage. Returns it on the rank of that stage, else None."""
        source, target = self.schedule.owner(index), self.schedule.owner(index + 1)
        if source == target:
            return output
        with self._boundary.unrecorded() as kind:
            if output is not None:
                self._boundary.send(Transfer("send", "activation", index + 1, 0, target), output, kind)
            if target == self._axis.rank:
                self._boundary.receive(Transfer("receive", "activation", index + 1, 0, source), kind)
                return self._boundary.take("activation", index + 1, 0)
        return None

    def _begin(self, batches: Sequence[Any], arrived_by: Mapping[Key, Sequence[Key]] | None = None) -> None:
        self._boundary.begin(arrived_by)
        self._flights.clear()
        self._weights.clear()
        self._made.clear()
        self._kinds = [self._boundary.kind_of(batch) for batch in batches]

    def _survey(self, forward: ForwardFn, batches: Sequence[Any]) -> None:
        """Find the tensors that cross stage boundaries. Unsupported models raise here, before any rank waits."""
        stage = next(iter(self.stages.values()))
        for batch in batches:
            stage.survey(forward, batch)

    def _move(self, transfer: Transfer) -> None:
        """Start this rank's part of a transfer. Does nothing for a gradient that is not needed."""
        if transfer.content == "gradient":
            # The stage after a boundary sends a gradient if any parameter before the boundary is trained.
            receives = transfer.way == "receive"
            stage = self.stages[transfer.stage + (not receives)]
            if not (stage.trains if receives else stage.takes_gradient):
                return
        kind = self._kinds[transfer.microbatch]
        if transfer.way == "receive":
            self._boundary.receive(transfer, kind)
        else:
            made = self._made.pop((transfer.content, transfer.stage, transfer.microbatch))
            self._boundary.send(transfer, made, kind)

    def _act(self, action: Action, work: StepWork, phases: Phases) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        self._held.may_defer = (action.stage, microbatch) in self._split
        if action.kind == "F":
            self._forward(stage, microbatch, work, phases)
        elif not stage.trains:
            self._flights.pop((stage.index, microbatch), None)
        elif action.kind == "W":
            with phases.phase("weight gradients"):
                deliver(self._weights.pop((stage.index, microbatch)))
        else:
            self._backward(stage, microbatch, phases, holds=action.kind == "B")

    def _incoming(self, stage: int, microbatch: int) -> Carried | None:
        if stage == 0:
            return None
        made = self._made.pop(("activation", stage, microbatch), None)
        return self._boundary.take("activation", stage, microbatch) if made is None else made.detach()

    def _forward(self, stage: Stage, microbatch: int, work: StepWork, phases: Phases) -> None:
        batch = work.microbatches[microbatch]
        with phases.phase("wait"):
            incoming = self._incoming(stage.index, microbatch)
        self._computed = time.perf_counter()
        if incoming is not None and stage.takes_gradient:
            for tensor in incoming.tensors:
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        if work.seeds is not None:
            torch.manual_seed((work.seeds[microbatch] + stage.index * _SEED_STRIDE) % 2**63)
        with phases.phase("forward"), work.inside(microbatch) if work.inside else contextlib.nullcontext():
            output = stage.forward(work.forward_to_loss if stage.is_last else work.forward, batch, incoming)
            if stage.is_last:
                loss_sum, num_tokens = work.loss(output, batch, microbatch)
                work.totals[0] += loss_sum.detach()
                work.totals[1] += num_tokens
                roots = [loss_sum * work.scale]
            else:
                self._made["activation", stage.index + 1, microbatch] = output.detach()
                roots = list(map(_edge_of, output.tensors))
        self._flights[stage.index, microbatch] = _Flight(incoming, roots)

    def _backward(self, stage: Stage, microbatch: int, phases: Phases, *, holds: bool) -> None:
        with phases.phase("wait"):
            grads = self._gradients(stage, microbatch, len(self._flights[stage.index, microbatch].roots))
        self._computed = time.perf_counter()
        flight = self._flights.pop((stage.index, microbatch))
        pairs = [(root, grad) for root, grad in zip(flight.roots, grads, strict=True) if root is not None]
        roots, grads = [root for root, _ in pairs], [grad for _, grad in pairs]
        with phases.phase("backward"):
            if holds:
                self._weights[stage.index, microbatch] = self._held.during(roots, grads) if roots else []
            elif roots:
                torch.autograd.backward(roots, grads)
        if stage.takes_gradient:
            assert flight.incoming is not None
            # If no output of the stage depends on its input, a gradient of zeros is sent, because the other rank waits
            # for it.
            given = [torch.zeros_like(each) if each.grad is None else each.grad for each in flight.incoming.tensors]
            self._made["gradient", stage.index - 1, microbatch] = Carried(flight.incoming.slots, tuple(given))

    def _gradients(self, stage: Stage, microbatch: int, count: int) -> Sequence[torch.Tensor | None]:
        if stage.is_last:
            return [None] * count
        made = self._made.pop(("gradient", stage.index, microbatch), None)
        return (self._boundary.take("gradient", stage.index, microbatch) if made is None else made).tensors


def _edge_of(output: torch.Tensor) -> Any:
    """Return the autograd edge of an output, which does not keep the output alive, or None if it needs no gradient."""
    return torch.autograd.graph.get_gradient_edge(output) if output.requires_grad else None


def build_pipeline(model: nn.Module, mesh: Mesh) -> dict[str, Placement]:
    """Keep only this rank's stages of a model, and attach the pipeline that runs them: `pipeline_of(model)`.

    Returns the placements of weights that two stages share. Errors are the same as for `split_model`.
    """
    split = split_model(model, mesh)
    setattr(model, _ATTRIBUTE, NotCopied(Pipeline(split, mesh)))
    return split.placements


def pipeline_of(model: nn.Module) -> Pipeline | None:
    """Return the pipeline that `parallelize` made for this module, or None if the plan has no pipeline."""
    attached = getattr(model, _ATTRIBUTE, None)
    return attached.value if attached is not None else None
