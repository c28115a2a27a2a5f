"""The order in which a rank gathers and reduces units, compared with the other ranks once and then with its own record.

Blocks are alike, so a rank that skips one would gather its shard of block 3 together with another rank's shard of
block 4, and compute with weights that never existed. In the first step the ranks therefore tell each other, before
every gather and reduction, what it is for. What they agreed on is the record of the steps that follow: a rank that
does what the record says asks nobody, and a rank that does something else asks the others. Where all ranks changed in
the same way they agree on the rest of this step, and it is the new record. Where others did not change, they are in the
gather or reduction of the record while this rank is in a comparison. The transport tells both that the two do not fit;
where it cannot (nccl), the hang is reported as any other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

from weft.comm.collectives import all_gather, start_all_reduce
from weft.comm.mesh import Axis
from weft.comm.pending import Pending
from weft.comm.wire.coder import Coder
from weft.errors import CommError
from weft.models.inspect.blocks import repeated_blocks
from weft.optim.step_decision import StepDecision
from weft.parallel.private_torch import (
    base_of_its_own,
    drop_unreduced_gradients,
    end_backward,
    forget_forward,
    fsdp_state,
    wrap_forward_hooks,
)
from weft.parallel.zero.adopt import step_by_decision, steps_in_parts
from weft.parallel.zero_sharded.shards import Shard
from weft.private_torch import graph_task, tree_map, uncompiled, without_modes

#: Forwards without a step add up (evaluation does); beyond this many acts there is no record to keep.
_MOST = 1 << 16
_REMEDY = (
    "Call the same modules in the same order on all of them; where one has nothing to compute, multiply its output "
    "by zero."
)


class Act(IntEnum):
    """What a rank is about to do with a unit."""

    GATHER = 0
    REDUCE = 1
    SUM = 2
    END = 3

    def told(self, unit: str) -> str:
        """In words, for an error."""
        if self is Act.END:
            return "ends the step"
        return f"{('gathers the weights', 'reduces the gradients', 'sums the gradients')[self]} of {unit}"


#: What a rank does, with which unit, in how many elements.
Entry = tuple[Act, int, int]


class Order:
    """What this rank does with the units over one axis, from one end of a step to the next.

    units: their names, by number.
    """

    def __init__(self, axis: Axis, units: Sequence[str]):
        self._axis = axis
        self._units = units
        self._record: list[Entry] = []
        self._done: list[Entry] = []  # in this step, while it is compared
        self._place = 0  # in the record, while this rank follows it
        self._follows = False

    def meet(self, act: Act, unit: int = 0, num_elements: int = 0) -> None:
        """Say what comes; CommError where ranks come for different things. No collective while it is as recorded."""
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
        """What to raise where a gather or reduction that was met for failed."""
        if not self._follows or not self._place:
            return error
        act, unit, _ = self._record[self._place - 1]
        return CommError(
            f"rank {self._rank} {act.told(self._units[unit])} as in the step before, and another rank does not "
            f"({error}) {_REMEDY}"
        )

    def first_gathers(self) -> list[int]:
        """Return the units that a step begins to gather, in order, up to the first that it does anything else with."""
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
        """This rank does not do what it did in the step before: right where all ranks changed in the same way."""
        self._done = self._record[: self._place]
        self._follows = False
        act, unit, _ = self._record[self._place]
        before = act.told(self._units[unit])
        try:
            self._compare(entry)
        except CommError as error:
            if isinstance(error, _Disagreement):
                raise
            now = entry[0].told(self._units[entry[1]])
            size = f" in {entry[2]} elements" if now == before else ""
            raise CommError(
                f"rank {self._rank} {now}{size}, and in the step before it was {before!r} here; other ranks did not "
                f"change ({error}) {_REMEDY}"
            ) from error
        self._done.append(entry)

    def _compare(self, entry: Entry) -> None:
        """All ranks' entries. In whole numbers, as no gather of weights is: two that do not fit are told apart."""
        mine = torch.tensor(entry, dtype=torch.int64)
        found = all_gather(mine, self._axis).view(-1, 3).tolist()
        rows: list[Entry] = [(Act(act), unit, size) for act, unit, size in found]
        if all(row == rows[0] for row in rows):
            return
        ranks = self._axis.ranks
        other = next(index for index, row in enumerate(rows) if row != rows[0])
        (act, unit, size), (other_act, other_unit, other_size) = rows[0], rows[other]
        ours, theirs = act.told(self._units[unit]), other_act.told(self._units[other_unit])
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
    """Ranks that compared what they do, and do different things."""


# Units that a forward needs before any block, gathered while the optimizer steps the others.


class FirstGathers:
    """Steps an optimizer in two parts, and gathers the first under the second.

    Args:
        modules: the units, by their number; the root last.
        shards: this rank's parts of each one's parameters.
        order: of what all ranks do, which knows what a forward begins with.
        device: of the weights.
    """

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        shards: Sequence[Sequence[Shard]],
        order: Order,
        device: torch.device,
    ):
        self._modules = modules
        self._shards = shards
        # They are gathered under what comes before them anyway.
        self._blocks = {*repeated_blocks(modules[-1]).values()} if isinstance(modules[-1], nn.Module) else set()
        self._order = order
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._early: list[tuple[FSDPModule, UnshardHandle]] = []

    def switch_on(self) -> None:
        """Gather early from here: who steps the optimizer knows that weights may travel between steps."""
        if self._device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)

    def step(self, optimizer: torch.optim.Optimizer, decision: StepDecision) -> None:
        """Step the optimizer, and begin to gather what the next forward begins with."""
        self.drop()
        first = self._first() if self._stream is not None and steps_in_parts(optimizer) else []
        params = {id(shard.local) for number in first for shard in self._shards[number]}
        step_by_decision(optimizer, decision, params, functools.partial(self._gather, first, self._stream))

    def hand_over(self) -> None:
        """Leave what was gathered early to the pass that begins: it waits for it and lets it go as usual."""
        self._early = []

    def drop(self) -> None:
        """Forget what was gathered early, between steps: shards may change now, and it would not follow."""
        early, self._early = self._early, []
        for module, handle in early:
            handle.wait()  # nothing where an evaluation has asked for it
            module.reshard()

    def _first(self) -> list[int]:
        """The units that are gathered before any block."""
        return [*itertools.takewhile(lambda one: self._modules[one] not in self._blocks, self._order.first_gathers())]

    def _gather(self, units: Sequence[int], stream: torch.cuda.Stream | None) -> None:
        assert stream is not None
        stream.wait_stream(torch.cuda.current_stream())
        # fully_shard gathers on the stream that is current, where it is asked to go on meanwhile.
        with torch.cuda.stream(stream):
            for module in (self._modules[number] for number in units):
                if (handle := module.unshard(async_op=True)) is not None:
                    self._early.append((module, handle))


# What Weft adds to fully_shard's own hooks: sums over replicas, calls of units, and the passes of a pipeline.


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
