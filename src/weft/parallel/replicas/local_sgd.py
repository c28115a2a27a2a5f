"""Local SGD: replicas that synchronize every H steps, and the outer step that combines them.

Between two outer steps, a replica trains on its own mesh (`Mesh.replica`). In an outer step, with w_r the weights of
replica r, R replicas, and the anchor (the weights from which all of them started):

    d       = mean over r of (anchor - w_r)         communicated, encoded by the plan's `compress`
    average: anchor -= d                            equals the mean of the weights
    diloco:  m = mu m + d;  anchor -= lr (d + mu m)  SGD with Nesterov momentum
    w_r     = anchor

Anchor and momentum are sharded like the master weights. Optimizer states stay local to each replica. Buffers that
training updates, such as running statistics, are averaged.

Method: Douillard et al. 2023, arXiv 2311.08105 (DiLoCo; its outer step has lr 0.7 and momentum 0.9); Stich 2019, arXiv
1805.09767 (averages of weights).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from weft.comm.collectives import all_gather, all_reduce, broadcast, gather_json, start_all_reduce
from weft.comm.mesh import Mesh
from weft.comm.pending import Pending
from weft.comm.wire.coder import Coder, Coders
from weft.comm.wire.wire_format import find_wire
from weft.config.plan import Plan
from weft.errors import CommError
from weft.parallel.state.flat_slices import FlatSlice, StateSource
from weft.parallel.state.gradients import DataParallel, NotCopied

#: Maximum number of elements in one collective. More would need as much additional memory as the master weights.
_AT_ONCE = 2**24
_ATTRIBUTE = "_weft_rare_sync"


@dataclass(slots=True)
class Bundle:
    """Tensors that replicas synchronize in one collective.

    Attributes:
        anchor: copy of the weights after the last outer step, 1-D: all tensors, concatenated.
        momentum: momentum of the outer optimizer, in the shape of `anchor`, or None.
        places: index of each tensor in the list of `RareSync.master_slices`.
        sizes: number of each tensor's elements on this rank.
        name: name of the first tensor.
        fragment: index of the tensors' fragment in `StreamedSync`, else 0.
        owed: residual from a checkpoint, which is added to the next outer step, or None.
    """

    anchor: torch.Tensor
    momentum: torch.Tensor | None
    places: tuple[int, ...]
    sizes: tuple[int, ...]
    name: str
    fragment: int = 0
    owed: torch.Tensor | None = None

    def with_carried_residual(self, delta: torch.Tensor) -> torch.Tensor:
        """Add the residual from a checkpoint, if any, to `delta` in place. Return `delta`."""
        return delta if self.owed is None else delta.add_(self.owed)

    def own_tensors(self, held: Sequence[FlatSlice]) -> list[FlatSlice]:
        return [held[place] for place in self.places]


class RareSync:
    """Outer steps (local SGD, DiLoCo) of one model's replicas, on one rank.

    Attributes:
        since: steps since the last outer step.
        meetings: number of outer steps so far.
        replicas: number of replicas.
        place: index of this rank's replica.
        outer_lr, outer_momentum: hyperparameters of `diloco`.
        meets_now: True if the current step ends with an outer step regardless of the plan, because it is the last step.
        differs: True if weights may differ from the anchor, because this replica has trained since the last outer step.

    Args:
        engine: engine of the model, on the mesh of its replica.
        mesh: mesh of all replicas, or of one replica if each is a separate job.
        plan: plan of all replicas, or None for the mesh's plan.
    """

    #: True if each replica is a separate job, which communicates with others only in outer steps.
    is_apart = False

    def __init__(self, model: nn.Module, engine: DataParallel, mesh: Mesh, plan: Plan | None = None):
        plan = plan or mesh.plan
        self.plan, self.way, self.every = plan, plan.sync_method, plan.sync_every
        self.outer_lr, self.outer_momentum = 0.7, 0.9
        self.since = self.meetings = 0
        self.meets_now = self.differs = False
        self.mesh, self._axis, self._engine = mesh, mesh["dp_replicate"], engine
        self.replicas, self.place = self._axis.size, self._axis.rank
        self._coders = None if plan.compress == "none" else Coders(find_wire(plan.compress))
        buffers = {engine.axes.saved_name(name) for name, one in model.named_buffers() if one.is_floating_point()}
        trained = {name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
        self._buffers = buffers - trained
        self._names: frozenset[str] | None = None
        self._runs: list[Bundle] = []
        self._is_away = False  # the model holds the anchor, and the bundles its weights

    @property
    def is_due(self) -> bool:
        """True if the current step ends with an outer step."""
        return self.meets_now or self.since + 1 >= self.every

    @torch.no_grad()
    def begin(self) -> None:
        """Copy the first replica's weights to all replicas, and set the anchor to them. All ranks call it.

        Call it after the engine's `adopt`. It does nothing if the anchor is already set. Raises CommError if replicas
        have models with different numbers of tensors or elements.
        """
        if self._runs:
            return
        held = self.master_slices()
        self._check_identical(held)
        for one in held:
            broadcast(one.flat, self._axis)
            one.bring_home()
        self._engine.publish()
        self.take_anchor()

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Set the anchor to the current weights, the outer momentum to zero, and drop residuals."""
        if self._coders is not None:
            self._coders.forget()
        held = self.master_slices()
        self._runs, self.differs = [], False
        for places in self._sync_groups(held):
            run = [held[place] for place in places]
            anchor = torch.cat([one.flat for one in run])
            has_momentum = self.way == "diloco" and not self._is_buffer(run)
            momentum = torch.zeros_like(anchor) if has_momentum else None
            sizes = tuple(one.flat.numel() for one in run)
            fragment = self._fragment_of(run[0].name)
            self._runs.append(Bundle(anchor, momentum, tuple(places), sizes, run[0].name, fragment))

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step, and run the outer step if it is due. All ranks call it after the weights are published.

        Raises CommError if the outer step is due and weights of any rank are not finite. No weights are exchanged then.
        """
        is_due, self.meets_now = self.is_due, False
        self.since, self.differs = self.since + 1, True
        if is_due:
            self._sync()

    def _sync(self) -> None:
        self._engine.wait_for_weights()
        held = self.master_slices()
        self._refuse_unfit(held)
        if self._coders is not None:
            self._coders.take_turn(self.meetings)
        for run in self._runs:
            here = run.own_tensors(held)
            delta = run.with_carried_residual(run.anchor - torch.cat([one.flat for one in here]))
            all_reduce(delta, self._axis, wire=self._coder(run, here))
            run.owed = None
            self._step(run, delta.div_(self.replicas), averages=self._is_buffer(here))
            put_anchor(here, run)
        if self._coders is not None:
            self._coders.commit()
        self._engine.publish()
        self.since, self.meetings, self.differs = 0, self.meetings + 1, False

    def _coder(self, run: Bundle, here: Sequence[FlatSlice]) -> Coder | None:
        return None if self._coders is None or self._is_buffer(here) else self._coders[f"sync {run.name}"]

    def _step(self, run: Bundle, delta: torch.Tensor, *, averages: bool) -> None:
        momentum = None if averages else run.momentum
        outer_step(run.anchor, delta, momentum, lr=self.outer_lr, factor=self.outer_momentum)

    def master_slices(self) -> list[FlatSlice]:
        """Return this rank's flat slices of master weights and floating-point buffers. Local; no communication."""
        engine = self._engine
        names = frozenset(map(engine.axes.saved_name, engine.local_weights())) | self._buffers
        return [one for one in engine.model_slices() if one.name in names and one.flat.is_floating_point()]

    def anchors(self) -> list[FlatSlice]:
        """Return the anchor as flat slices, one for each tensor in `master_slices`."""
        return self._placed((run, run.anchor) for run in self._runs)

    def momenta(self) -> list[FlatSlice]:
        """Return the momenta of the outer optimizer as flat slices. Buffers have no momentum."""
        return self._placed((run, run.momentum) for run in self._runs if run.momentum is not None)

    def residual_slices(self) -> list[FlatSlice]:
        """Return the residuals that this replica adds to the next outer step, as flat slices."""
        found: list[tuple[Bundle, torch.Tensor]] = []
        for run in self._runs:
            debt = run.owed
            if debt is None and self._coders is not None and self._coders.has_residual:
                kept = dict(self._coders[f"sync {run.name}"].states())
                debt = next((one.view(-1) for name, one in kept.items() if name.endswith("/residual")), None)
            if debt is not None:
                found.append((run, debt))
        return self._placed(found)

    @torch.no_grad()
    def load_residual(self, source: StateSource, whose: Sequence[str], replicas: int) -> None:
        """Load residuals from a checkpoint for the next outer step. All ranks call it.

        whose: name prefixes in `source` of the residuals to sum, one prefix for each replica of the checkpoint.
        replicas: divisor of the sum: 1 if this replica loads only its own residuals, or the number of replicas in the
        checkpoint if each replica loads all of them, because outer steps compute means.
        """
        held = self.master_slices()
        for run in self._runs:
            total = torch.zeros_like(run.anchor)
            parts = zip(run.own_tensors(held), total.split(list(run.sizes)), strict=True)
            for one, part in parts:
                for start in whose:
                    if start + one.name in source.entries:
                        like = replace(one, name=start + one.name, flat=torch.empty_like(part), home=None)
                        like.fill(source)
                        part.add_(like.flat)
            run.owed = total.div_(replicas) if total.any() else None

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Set the model to the anchor in the context, for evaluation and export, and restore its weights at the end.

        All ranks enter it. It does nothing if the weights equal the anchor, or inside another such context.
        """
        if not self.differs or self._is_away:
            yield
            return
        self._swap()
        self._is_away = True
        try:
            yield
        finally:
            self._is_away = False
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._engine.wait_for_weights()
        held = self.master_slices()
        for run in self._runs:
            here = run.own_tensors(held)
            own = torch.cat([one.flat for one in here])
            put_anchor(here, run)
            run.anchor.copy_(own)
        self._engine.publish()

    def _placed(self, tensors: Iterable[tuple[Bundle, torch.Tensor]]) -> list[FlatSlice]:
        held, found = self.master_slices(), list[FlatSlice]()
        for run, flat in tensors:
            parts = zip(run.own_tensors(held), flat.split(list(run.sizes)), strict=True)
            found += [replace(one, flat=part, home=None) for one, part in parts]
        return found

    def _fragment_of(self, name: str) -> int:
        """Return the fragment of a tensor, by the tensor's name in checkpoints. Equal on all ranks that store it."""
        del name
        return 0

    def _is_buffer(self, run: Sequence[FlatSlice]) -> bool:
        return run[0].name in self._buffers

    def _sync_groups(self, held: Sequence[FlatSlice]) -> Iterator[list[int]]:
        """Yield lists of indices in `held`: the tensors that one collective synchronizes.

        They have the same fragment, dtype, device and ranks, and are either all buffers or all weights. A list with
        several tensors has at most 2^24 elements.

        Tensors that several ranks of a replica store must be encoded identically on all of them, or their copies would
        diverge. A quantization scale covers adjacent elements, and on tp ranks different shards would be adjacent to
        the same replicated tensor. So lists do not mix tensors that are stored by different ranks.
        """
        kinds: dict[tuple[object, ...], list[int]] = {}
        for place, one in enumerate(held):
            fragment, ranks = self._fragment_of(one.name), frozenset(one.deal.ranks)
            kind = fragment, one.flat.dtype, one.flat.device, one.name in self._buffers, ranks
            kinds.setdefault(kind, []).append(place)
        for places in kinds.values():
            run, numel = list[int](), 0
            for place in sorted(places, key=lambda place: held[place].name):
                if run and numel + held[place].flat.numel() > _AT_ONCE:
                    yield run
                    run, numel = [], 0
                run.append(place)
                numel += held[place].flat.numel()
            yield run

    def _refuse_unfit(self, held: Sequence[FlatSlice]) -> None:
        """Raise CommError on all ranks if weights of any rank are not finite, before weights are exchanged."""
        bad = sum(not bool(one.flat.isfinite().all()) for one in held)
        total = all_reduce(torch.tensor([float(bad)], dtype=torch.float64, device=self.mesh.device), self.mesh.world)
        if float(total):
            own = torch.tensor([int(bad > 0)], device=self.mesh.device)
            said = all_gather(own, self.mesh.world).tolist()
            ranks = [str(rank) for rank, one in zip(self.mesh.world.ranks, said, strict=True) if one]
            raise CommError(
                f"sync={self.plan.sync}: weights of rank {', '.join(ranks)} are not finite, and nothing was "
                "exchanged. Resume from the last checkpoint with a lower learning rate."
            )

    def _check_identical(self, held: Sequence[FlatSlice]) -> None:
        device = self.mesh.device
        count = torch.tensor([len(held), sum(one.flat.numel() for one in held)], device=device)
        most, least = (all_reduce(count.clone(), self._axis, op=op) for op in ("max", "min"))
        unlike = (most != least).any().to(torch.float64).reshape(1)
        if float(all_reduce(unlike, self.mesh.world)):
            raise CommError(
                f"sync={self.plan.sync}: replicas built different models. Build the same model on every rank."
            )


def outer_step(
    anchor: torch.Tensor, delta: torch.Tensor, momentum: torch.Tensor | None, *, lr: float, factor: float
) -> None:
    """Update the anchor in place: by SGD with Nesterov momentum, or to anchor - delta if `momentum` is None.

    Args:
        anchor: weights after the last outer step.
        delta: mean of (anchor - weights) over replicas, of the anchor's shape. Overwritten.
        momentum: momentum of the anchor's shape, updated in place, or None.
        lr, factor: learning rate and momentum factor.
    """
    if momentum is None:
        anchor.sub_(delta)
        return
    momentum.mul_(factor).add_(delta)
    anchor.sub_(delta.add_(momentum, alpha=factor), alpha=lr)


def put_anchor(here: Sequence[FlatSlice], run: Bundle) -> None:
    """Set the weights of a bundle to its anchor."""
    for one, part in zip(here, run.anchor.split(list(run.sizes)), strict=True):
        one.flat.copy_(part)
        one.bring_home()


def move(here: Sequence[FlatSlice], by: torch.Tensor, sizes: Sequence[int]) -> None:
    """Add values to flat slices in place. by: the values of all slices, concatenated, 1-D, in the slices' dtype."""
    for one, part in zip(here, by.split(list(sizes)), strict=True):
        one.flat.add_(part)
        one.bring_home()


def keep_sync(model: nn.Module, sync: RareSync) -> None:
    """Attach a `RareSync` to a model, replacing an earlier one."""
    setattr(model, _ATTRIBUTE, NotCopied(sync))


def rare_sync(model: nn.Module) -> RareSync | None:
    """Return the `RareSync` of a model's replicas, or None if they synchronize in every step."""
    kept = getattr(model, _ATTRIBUTE, None)
    return None if kept is None else kept.value


def anchored(model: nn.Module) -> AbstractContextManager[None]:
    """Set a model to its last synchronized weights in the context. Does nothing if replicas sync in every step."""
    sync = rare_sync(model)
    return nullcontext() if sync is None else sync.anchored()


# Replicas that synchronize one fragment after another: communication overlaps with the next step.


@dataclass(slots=True)
class _Sent:
    """A bundle whose all_reduce is pending. own: (anchor - weights) of this replica when it started."""

    run: Bundle
    own: torch.Tensor
    pending: Pending


class StreamedSync(RareSync):
    """Outer steps of one model's replicas, with fragments that synchronize one after another.

    In every H steps, each fragment synchronizes once. Its all_reduce overlaps with the next step, after which the
    result is applied. `since` is the number of steps in the current H steps, and `meetings` counts each fragment's
    outer step. engine: engine of the model, on the mesh of its replica.
    """

    def __init__(self, model: nn.Module, engine: DataParallel, mesh: Mesh):
        super().__init__(model, engine, mesh)
        self.fragments = self.plan.sync_fragments
        self._places = _fragments(model, engine, mesh, self.fragments)
        #: For each fragment, the value of `since` after which its all_reduce starts.
        self._leaves = [(number + 1) * self.every // self.fragments for number in range(self.fragments)]
        self._sent: list[_Sent] = []
        self._is_under_way = False  # a fragment is pending, even if this rank stores none of it

    @property
    def is_due(self) -> bool:
        """True if the all_reduce of a fragment, or with `meets_now` of all fragments, starts after the current step."""
        return self.meets_now or self.since + 1 in self._leaves

    @torch.no_grad()
    def take_anchor(self) -> None:
        """Set the anchor to the current weights as in `RareSync`, after dropping the results of pending fragments."""
        for one in self._sent:
            one.pending.wait()
        self._sent.clear()
        self._is_under_way = False
        super().take_anchor()

    @torch.no_grad()
    def after_step(self) -> None:
        """Count a step, apply the pending fragment's outer step, and start the all_reduce of a fragment that is due.

        With `meets_now`, all fragments are synchronized together instead, without overlap. All ranks call it after the
        weights are published. Raises CommError if weights to send are not finite on any rank. They are not sent then.
        """
        meets_now, self.meets_now = self.meets_now, False
        self.since, self.differs = self.since + 1, True
        self._engine.wait_for_weights()
        self._receive()
        if meets_now:
            self._sync()
        elif self.since in self._leaves:
            self._send(self._leaves.index(self.since))
        self.since %= self.every

    def sent(self) -> list[FlatSlice]:
        """Return this replica's weights of the pending fragment, as they were when its all_reduce started."""
        return self._placed((one.run, one.run.anchor - one.own) for one in self._sent)

    @torch.no_grad()
    def send_again(self, source: StateSource, start: str) -> None:
        """Start again the all_reduce that was pending when a checkpoint was saved. All ranks call it.

        Does nothing if none was pending. A bundle is left out if some of its tensors are not in `source`. start: prefix
        of the fragment's weights in `source`.
        """
        held = self.master_slices()
        self._is_under_way = any(name.startswith(start) for name in source.entries)
        for run in self._runs:
            here = run.own_tensors(held)
            if not all(start + one.name in source.entries for one in here):
                continue  # another fragment or sharding: its changes are sent next time
            weights = torch.empty_like(run.anchor)
            for one, part in zip(here, weights.split(list(run.sizes)), strict=True):
                replace(one, name=start + one.name, flat=part, home=None).fill(source)
            self._start(run, run.anchor - weights, held)

    def _send(self, fragment: int) -> None:
        held = self.master_slices()
        self._refuse_unfit([one for one in held if self._fragment_of(one.name) == fragment])
        self._is_under_way = True
        for run in self._runs:
            if run.fragment == fragment:
                self._start(run, run.anchor - torch.cat([one.flat for one in run.own_tensors(held)]), held)

    def _start(self, run: Bundle, own: torch.Tensor, held: list[FlatSlice]) -> None:
        if self._coders is not None:
            self._coders.take_turn(self.meetings)
        coder = self._coder(run, run.own_tensors(held))
        # With an empty list of staged operations, so that later collectives on the mesh do not wait for this one's
        # first stage.
        over = replace(self._axis, staged=[])
        self._sent.append(_Sent(run, own, start_all_reduce(run.with_carried_residual(own.clone()), over, wire=coder)))

    def _receive(self) -> None:
        """Apply the outer step of the pending fragment, if any, and add this replica's changes since its start."""
        if not self._is_under_way:
            return
        held = self.master_slices()
        for one in self._sent:
            run, here = one.run, one.run.own_tensors(held)
            before = run.anchor - one.own
            self._step(run, one.pending.wait().div_(self.replicas), averages=self._is_buffer(here))
            move(here, run.anchor - before, run.sizes)
            run.owed = None
        if self._coders is not None:
            self._coders.commit()
        self._sent.clear()
        self._engine.publish()
        self.meetings, self._is_under_way = self.meetings + 1, False

    def _fragment_of(self, name: str) -> int:
        return self._places.get(name, 0)


def _fragments(model: nn.Module, engine: DataParallel, mesh: Mesh, fragments: int) -> dict[str, int]:
    """Return the fragment of each tensor, by its name in checkpoints.

    Fragments contain adjacent tensors, and have similar numbers of elements. The tensors of each pipeline stage are
    split into all fragments, so that its ranks send about equal amounts each time. A tensor in two stages has the
    fragment of the first stage.
    """
    axes, own = engine.axes, dict[str, int]()
    for name, one in (*model.named_parameters(), *model.named_buffers()):
        own.setdefault(axes.saved_name(name), torch.Size(axes.full_shape(name, one.shape)).numel())
    found: dict[str, int] = {}
    for sizes in gather_json(own, mesh["pp"], mesh.device):
        total, before = sum(sizes.values()), 0
        for name, numel in sizes.items():
            middle = before + numel / 2
            found.setdefault(name, min(int(middle / max(total, 1) * fragments), fragments - 1))
            before += numel
    return found


def attach_local_sgd(model: nn.Module, engine: DataParallel, mesh: Mesh) -> None:
    """Attach a `RareSync`, or a `StreamedSync` for fragments, to the model if the plan uses local SGD."""
    if mesh.plan.sync != "step":
        kind = StreamedSync if mesh.plan.sync_fragments else RareSync
        keep_sync(model, kind(model, engine, mesh))
