"""Check that all ranks gather and reduce units in the same order, by comparison with each other and with a record.

Blocks have equal shapes. A rank that skips one would gather its shard of block 3 together with another rank's shard of
block 4, and compute with wrong weights. In the first step, ranks therefore exchange which gather or reduction they
start next, before each one. The result is recorded for the following steps. A rank that follows the record compares
nothing, and a rank that deviates starts a comparison. If all ranks changed equally, they compare the rest of
this step, which becomes the new record. If others did not change, they run the recorded gather or reduction while this
rank runs a comparison. The transport reports the mismatch to both. If it cannot (nccl), the ranks hang, and the hang
watch reports it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from weft.comm.collectives import all_gather, start_all_reduce
from weft.comm.mesh import Axis
from weft.comm.pending import Pending
from weft.comm.wire.coder import Coder
from weft.devices import access
from weft.errors import CommError, ModelError
from weft.models.inspect.blocks import class_name, repeated_blocks
from weft.optim.step_decision import StepDecision
from weft.parallel.private_torch import (
    base_of_its_own,
    before_backward_of,
    end_backward,
    forget_forward,
    fsdp_state,
    gathered_parts,
    replaced_parameters,
    wrap_forward_hooks,
)
from weft.parallel.state.forward_writes import Contents
from weft.parallel.zero.engine import step_by_decision, steps_in_parts
from weft.parallel.zero_sharded.shards import Shard
from weft.private_torch import graph_task, named_modules, tree_map, uncompiled, without_modes

#: Without optimizer steps (as in evaluation) operations accumulate. Beyond this number no record is kept.
_MOST = 1 << 16
_REMEDY = (
    "Call the same modules in the same order on all of them; where one has nothing to compute, multiply its output "
    "by zero."
)


class Act(IntEnum):
    """Operation of a rank on a unit."""

    GATHER = 0
    REDUCE = 1
    SUM = 2
    END = 3

    def describe(self, unit: str) -> str:
        if self is Act.END:
            return "ends the step"
        return f"{('gathers the weights', 'reduces the gradients', 'sums the gradients')[self]} of {unit}"


#: Operation, unit index, and number of elements.
Entry = tuple[Act, int, int]


class Order:
    """Checks that the ranks of an axis run the same operations in the same order. units: names of units by index."""

    def __init__(self, axis: Axis, units: Sequence[str]):
        self._axis, self._units = axis, units
        self._record: list[Entry] = []
        self._done: list[Entry] = []  # operations of this step, during comparison
        self._place = 0  # position in the record, while this rank follows it
        self._follows = False

    def check(self, act: Act, unit: int = 0, num_elements: int = 0) -> None:
        """Check the next operation against the record, or against the other ranks if it deviates from the record.

        Raises CommError if ranks start different operations.
        """
        if self._axis.size == 1:
            return
        entry = (act, unit, num_elements)
        if self._follows and self._record[self._place] != entry:
            self._leave_record(entry)
        elif self._follows:
            self._place += 1
        else:
            self._compare(entry)
            self._done.append(entry)
        if act is Act.END:
            self._end()
        elif len(self._done) > _MOST:
            self._done = []
            self._record = []

    def explain(self, error: CommError) -> CommError:
        """Return the error for a gather or reduction that failed although its check passed.

        If this rank follows the record, ranks did not compare the operation, and the result names it. Otherwise, this
        returns `error`.
        """
        if not self._follows or not self._place:
            return error
        act, unit, _ = self._record[self._place - 1]
        return CommError(
            f"rank {self._rank} {act.describe(self._units[unit])} as in the step before, and another rank does not "
            f"({error}) {_REMEDY}"
        )

    def first_gathers(self) -> list[int]:
        """Return the units that a step gathers before any other kind of operation, in order; [] without a record."""
        gathers = itertools.takewhile(lambda entry: entry[0] is Act.GATHER, self._record)
        return list(dict.fromkeys(unit for _, unit, _ in gathers))

    @property
    def _rank(self) -> int:
        return self._axis.ranks[self._axis.rank]

    def _end(self) -> None:
        if not self._follows:
            self._record, self._done = self._done, []
        self._follows = bool(self._record)
        self._place = 0

    def _leave_record(self, entry: Entry) -> None:
        """Compare an operation that differs from the last step. Raises CommError unless all ranks changed equally."""
        self._done = self._record[: self._place]
        self._follows = False
        act, unit, _ = self._record[self._place]
        before = act.describe(self._units[unit])
        try:
            self._compare(entry)
        except CommError as error:
            if isinstance(error, _Disagreement):
                raise
            now = entry[0].describe(self._units[entry[1]])
            size = f" in {entry[2]} elements" if now == before else ""
            raise CommError(
                f"rank {self._rank} {now}{size}, and in the step before it was {before!r} here; other ranks did not "
                f"change ({error}) {_REMEDY}"
            ) from error
        self._done.append(entry)

    def _compare(self, entry: Entry) -> None:
        """Compare all ranks' entries. Entries are int64, unlike gathered weights, so transports detect a mismatch."""
        mine = torch.tensor(entry, dtype=torch.int64)
        found = all_gather(mine, self._axis).view(-1, 3).tolist()
        rows: list[Entry] = [(Act(act), unit, size) for act, unit, size in found]
        if all(row == rows[0] for row in rows):
            return
        ranks = self._axis.ranks
        other = next(index for index, row in enumerate(rows) if row != rows[0])
        (act, unit, size), (other_act, other_unit, other_size) = rows[0], rows[other]
        ours, theirs = act.describe(self._units[unit]), other_act.describe(self._units[other_unit])
        if (act, unit) == (other_act, other_unit):
            raise _Disagreement(
                f"rank {ranks[0]} {ours} in {size} elements and rank {ranks[other]} in {other_size}: the ranks used "
                f"different parameters of it in this step. Use the same ones on all ranks; where one has nothing to "
                f"compute, multiply its output by zero."
            )
        raise _Disagreement(
            f"rank {ranks[0]} {ours} while rank {ranks[other]} {theirs}: the ranks call different modules, and with "
            f"zero=3 each call needs all ranks. {_REMEDY}"
        )


class _Disagreement(CommError):
    """Error if the compared operations of the ranks differ."""


# Units that forward needs before any block. They are gathered while the optimizer steps the other units.


class FirstGathers:
    """Steps an optimizer in two parts, and overlaps all-gathers of the first part's weights with the second part.

    modules: the units, by index; the root last. order: order of all ranks' operations, which contains the first gathers
    of a forward.
    """

    def __init__(
        self, modules: Sequence[FSDPModule], shards: Sequence[Sequence[Shard]], order: Order, device: torch.device
    ):
        self._modules, self._shards = modules, shards
        # Gathers of blocks overlap with earlier computation in any case.
        self._blocks = {*repeated_blocks(modules[-1]).values()} if isinstance(modules[-1], nn.Module) else set()
        self._order, self._device = order, device
        self._stream: torch.Stream | None = None
        self._early: list[tuple[FSDPModule, UnshardHandle]] = []

    def switch_on(self) -> None:
        """Enable early gathers, if collectives overlap. Call it only if weights may be gathered between steps."""
        if self._stream is None and access.collectives_overlap(self._device):
            self._stream = access.new_stream(self._device, priority=-1)

    def step(self, optimizer: torch.optim.Optimizer, decision: StepDecision) -> None:
        """Step the optimizer, and start the first gathers of the next forward.

        No gather is started unless `switch_on` was called and the optimizer supports steps in two parts.
        """
        self.drop()
        first: list[int] = []
        if self._stream is not None and steps_in_parts(optimizer):  # units that are gathered before any block
            gathers = self._order.first_gathers()
            first += itertools.takewhile(lambda one: self._modules[one] not in self._blocks, gathers)
        params = {id(shard.local) for number in first for shard in self._shards[number]}
        step_by_decision(optimizer, decision, params, functools.partial(self._gather, first, self._stream))

    def hand_over(self) -> None:
        """Forget early gathers when a forward begins: fully_shard then waits for them and frees the weights."""
        self._early = []

    def drop(self) -> None:
        """Drop early gathers between steps. Shards may change after this, and gathered weights would be outdated."""
        early, self._early = self._early, []
        for module, handle in early:
            handle.wait()  # no-op if an evaluation has already waited
            module.reshard()

    def _gather(self, units: Sequence[int], stream: torch.Stream | None) -> None:
        assert stream is not None
        stream.wait_stream(access.current_stream(self._device))
        # With async_op=True, fully_shard gathers on the current stream.
        with access.on_stream(stream):
            for module in (self._modules[number] for number in units):
                if (handle := module.unshard(async_op=True)) is not None:
                    self._early.append((module, handle))


# Additions to fully_shard's own hooks: sums over replicas, calls to units, and the microbatches of a pipeline.


class ReplicaSum:
    """Second stage of HSDP's reduction for one unit: sums shards of gradients over the replicas.

    fully_shard calls it with the flat sum over the shard axis, before the sum becomes the gradients of `params` (as
    views, or added to existing gradients). Only the last microbatch's call communicates over the replicas. wire:
    returns the coder for a given number of elements.
    """

    def __init__(
        self, unit: int, params: Sequence[nn.Parameter], axis: Axis, order: Order, wire: Callable[[int], Coder]
    ):
        self._unit, self._params, self._axis, self._order, self._wire = unit, params, axis, order, wire
        self._kept: torch.Tensor | None = None
        self._pending: Pending | None = None
        #: False in all microbatches of a step but the last.
        self.last = True
        #: True if no code reads or writes gradients before `wait`.
        self.may_overlap = False
        #: Gradient factor of an unsharded unit, because fully_shard would divide its gradients twice.
        self.factor = 1.0

    def __call__(self, sums: torch.Tensor) -> None:
        if self.factor != 1.0:
            sums *= self.factor
        if not self.last:
            if self._kept is None:
                self._kept = sums  # gradients are views of it, and fully_shard accumulates into them
            return
        if self._kept is not None:
            sums += self._kept
            if access.has_streams(sums.device):
                # Allocated on the stream of reduce_scatter, whose next result must not reuse this memory before the
                # addition.
                self._kept.record_stream(access.current_stream(sums.device))
            for param in self._params:
                param.grad = None
            self._kept = None
        self._order.check(Act.SUM, self._unit, sums.numel())
        # A second reduction of a unit in a step is added immediately, so the first sum must be complete by then.
        again = self._pending is not None
        self.wait()
        pending = start_all_reduce(sums, self._axis, wire=self._wire(sums.numel()))
        if self.may_overlap and not again:
            self._pending = pending
        else:
            pending.wait()

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def clear(self) -> None:
        self.wait()
        self._kept = None


def watch_calls(
    modules: Sequence[FSDPModule], begin_root: Callable[[nn.Module, Any], None], *, recompute: bool
) -> None:
    """Register hooks that count the calls to each unit in a forward, and call `begin_root` before forwards of the root.

    A unit that is called once is reduced with zeros for the parameters that this rank did not use, so ranks may use
    different parameters. With several calls, fully_shard would reduce zeros once per call, so only existing gradients
    are reduced. modules: the units, by index; the root last.
    """
    counts: dict[int, int] = {}
    units = [module for module in modules if isinstance(module, nn.Module)]
    root = units[-1]

    def count(module: Any, args: Any) -> None:
        if module is root:
            counts.clear()
        # A call during backward is a recomputation, not another use.
        if torch.is_grad_enabled() and graph_task() == -1:
            calls = counts[id(module)] = counts.get(id(module), 0) + 1
            if calls <= 2:
                module.set_reduce_scatter_unused_params(calls == 1, recurse=False)

    for module in units:
        set_zeros = getattr(module, "set_reduce_scatter_unused_params", None)  # torch 2.13 and later
        if set_zeros is not None:
            set_zeros(True, recurse=False)
            module.register_forward_pre_hook(uncompiled(count))
    if recompute and not repeated_blocks(root):
        # Recompute counts operations, and gathering differs in recomputation: the unit may already be unsharded.
        for module in units[:-1]:
            wrap_forward_hooks(module, lambda hook: functools.partial(_outside_of_modes, hook))
    root.register_forward_pre_hook(uncompiled(begin_root))


@uncompiled
def without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """Return a unit's output as tensors that are not views. Register it as a forward hook before fully_shard's own.

    A layer with a bias returns a view. An in-place operation on a view would remove the hook that gathers the unit for
    backward. A tensor that requires no gradient stays the same object: a head's loss identifies labels by identity.
    """
    del module, args
    return tree_map(
        lambda one: base_of_its_own(one) if isinstance(one, torch.Tensor) and one.requires_grad else one, output
    )


@uncompiled
def _outside_of_modes(hook: Any, *args: Any) -> Any:
    with without_modes():
        return hook(*args)


class StagePasses:
    """The microbatches of one pipeline step, whose forwards and backwards interleave.

    fully_shard expects complete root forwards, each followed by its backward. But a stage leaves the root's forward
    early, and gradients accumulate unreduced until the schedule ends. As in torch.distributed.pipelining, fully_shard's
    actions at the end of a backward are called explicitly.
    """

    def __init__(self, modules: Sequence[FSDPModule]):
        self._modules = modules
        # Get it now, while all modules are registered: each stage replaces the modules of the other stages later.
        self._root = fsdp_state(modules[-1])

    def begin(self) -> None:
        """Reset the state of a forward that a stage left early."""
        forget_forward(self._root)
        self._modules[-1].set_is_last_backward(False)

    def end(self) -> None:
        """Reduce the accumulated gradients of all backwards, and free the parameters."""
        self._modules[-1].set_is_last_backward(True)
        end_backward(self._modules[::-1], self._root)


# Restrictions of forward under zero=3: no writes to parameters, and no gradients through units computed in it.


class ForwardLimits:
    """Raises ModelError for gradients through units computed in forward, and for writes to parameters in forward.

    Writes are checked in the first training forward of each unit, and values that replace its parameters for one call
    in each forward. Under a pipeline, the forward of a stage ends with an exception of the runtime, after which torch
    calls no hooks. Gradients in forward are then not detected.

    Before the first step, forwards run on a few samples, and a rank that calls more units than the others would wait
    for them. Until the first step, ranks therefore also compare their operations at the end of each forward. units:
    the units, by name; the root last.
    """

    def __init__(self, units: Sequence[tuple[str, FSDPModule]], orders: Sequence[Order], *, is_stage: bool = False):
        _, root = units[-1]
        assert isinstance(root, nn.Module)
        self._root = root
        self._paths = {id(module): path for path, module in named_modules(root)}
        self._orders, self._is_inside = orders, False
        # After the forward of a stage, torch calls no hooks of the root.
        self._unwatched = {id(module) for _, module in units if not (is_stage and module is root)}
        self._before: dict[int, dict[str, tuple[torch.Tensor, Contents]]] = {}
        for name, module in units:
            assert isinstance(module, nn.Module)
            if not is_stage:
                before_backward_of(module, self._refusing(name or class_name(root)))
            # Before fully_shard's own hook, which gathers the unit's parameters into the modules.
            module.register_forward_pre_hook(uncompiled(self._refuse_others), prepend=True)
            module.register_forward_pre_hook(uncompiled(self._enter))
            module.register_forward_hook(uncompiled(self._leave), prepend=True, always_call=True)

    def begin_steps(self) -> None:
        self._orders = ()

    def _refusing(self, name: str) -> Callable[[], None]:
        def refuse() -> None:
            self.begin_steps()  # in a custom training loop the first backward begins them
            if self._is_inside and graph_task() != -1:
                self._is_inside = False
                raise ModelError(
                    f"zero=3: forward computes a gradient through {name} (torch.autograd.grad or torch.func.grad), "
                    "whose weights exist only while it is called. Use zero=2."
                )

        return refuse

    def _enter(self, module: nn.Module, args: Any) -> None:
        del args
        if module is self._root:
            self._is_inside = True
        if id(module) in self._unwatched and self._root.training and graph_task() == -1:
            self._before[id(module)] = {name: (param, Contents.of(param)) for name, param in self._params(module)}

    def _refuse_others(self, module: nn.Module, args: Any) -> None:
        del args
        assert isinstance(module, FSDPModule)
        for owner, name in replaced_parameters(module):
            path = ".".join(filter(None, (self._paths.get(id(owner), ""), name)))
            raise ModelError(
                f"zero=3: forward gives {path} another value for one call, as torch.func.functional_call does, and "
                "zero=3 would replace it with the parameter. Use zero=2."
            )

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        if module is self._root:
            self._is_inside = False
            for order in self._orders if output is not None else ():
                order.check(Act.END)
        before = self._before.pop(id(module), None)
        if before is None or output is None:  # None: forward raised
            return
        now = dict(self._params(module))
        for name, (param, was) in before.items():
            if now.get(name) is param and was != Contents.of(param):
                raise ModelError(
                    f"parameter {name}: forward writes to it, and zero=3 has it only while a module is called, so the "
                    "values are lost. Write to parameters between steps, use a parametrization, or use zero=2."
                )
        self._unwatched.discard(id(module))

    def _params(self, module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
        if module is self._root:
            return self._root.named_parameters()
        assert isinstance(module, FSDPModule)
        parts = [(owner, name) for group in gathered_parts(module) for _, owner, name in group]
        return [(f"{self._paths.get(id(owner), '')}.{name}", getattr(owner, name)) for owner, name in parts]
